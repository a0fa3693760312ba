"""PEFT's LoRA layers inside a transformer: their numeric type, their state, and switching them off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from simpletune.adapters.lora_product import InPlaceLoraVariant

ADAPTER = "default"  # PEFT's name for the first adapter; the only one in training


def lora_layers(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """The layers that carry an update, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def compute_in_output_type(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Keep the updates' weights in one type; make their products in the activations' type, into the layer's output.

    PEFT would cast the activations up to the weights' type: fp32 products, and fp32 activations kept for backward.
    """
    for _, layer in lora_layers(model):
        layer.cast_input_dtype_enabled = False
        for adapter in layer.lora_A:
            layer.lora_variant[adapter] = InPlaceLoraVariant()
            for pair in (layer.lora_A, layer.lora_B):
                pair[adapter].weight = nn.Parameter(pair[adapter].weight.detach().to(dtype))


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """The updates' weights: ``{layer}.lora_A.weight`` [rank, i] and ``{layer}.lora_B.weight`` [o, rank]."""
    state = {}
    for name, layer in lora_layers(model):
        state[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight.detach()
        state[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight.detach()
    return state


@contextmanager
def updates_disabled(model: nn.Module) -> Iterator[None]:
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


def move_updates(model: nn.Module, device: torch.device) -> None:
    """Move the updates, and nothing else, to a device: beside streamed weights they are made in host memory."""
    for _, layer in lora_layers(model):
        for pair in (layer.lora_A, layer.lora_B):
            pair.to(device)
