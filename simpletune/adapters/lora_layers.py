"""PEFT's LoRA layers inside a transformer: their numeric type, their state, and switching them off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

ADAPTER = "default"  # PEFT's name for the first adapter; the only one in training


class InputTypeLinear(nn.Linear):
    """A linear layer whose weight is cast to its input's type: fp32 weights, products in bf16, say."""

    def forward(self, x: Tensor) -> Tensor:  # [..., i] -> [..., o]
        """x W^T in the type of x."""
        return F.linear(x, self.weight.to(x.dtype))


def lora_layers(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """The layers that carry an update, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def compute_in_input_type(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Keep the updates' weights in one type and their products in the activations' type.

    PEFT would cast the activations up to the weights' type: fp32 products, and fp32 activations kept for backward.
    """
    for _, layer in lora_layers(model):
        layer.cast_input_dtype_enabled = False
        for pair in (layer.lora_A, layer.lora_B):
            for adapter, old in list(pair.items()):
                new = InputTypeLinear(old.in_features, old.out_features, bias=False, device="meta")
                new.weight = nn.Parameter(old.weight.detach().to(dtype))
                pair[adapter] = new


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """The updates' weights: ``{layer}.lora_A.weight`` [rank, i] and ``{layer}.lora_B.weight`` [o, rank]."""
    state = {}
    for name, layer in lora_layers(model):
        state[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight.detach()
        state[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight.detach()
    return state


@contextmanager
def updates_off(model: nn.Module) -> Iterator[None]:
    """The model without its updates, exactly: PEFT skips them."""
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def detach(model: nn.Module) -> None:
    """Take every update off: each wrapped layer is again the very layer that it was."""
    for name, layer in list(lora_layers(model)):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config  # or PEFT would take the next update for a second one of the same name


def rescale(model: nn.Module, scale: float) -> None:
    """Give every update this strength."""
    for _, layer in lora_layers(model):
        layer.scaling[ADAPTER] = scale


def bring_to(model: nn.Module, device: torch.device) -> None:
    """Move the updates, and nothing else, to a device: beside streamed weights they are made in host memory."""
    for _, layer in lora_layers(model):
        for pair in (layer.lora_A, layer.lora_B):
            pair.to(device)
