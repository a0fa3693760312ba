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
