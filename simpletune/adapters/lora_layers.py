"""Handle PEFT's LoRA layers inside a transformer: data type, state, and disabling them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from simpletune.adapters.lora_product import InPlaceLoraVariant

ADAPTER = "default"  # PEFT's name for the first adapter, the only one in training


def shape_of(module: nn.Module) -> tuple[int, ...] | None:
    """The logical shape of the weight of a linear layer, [o, i], or a 1x1 convolution, [o, i, 1, 1]; None for others.

    A quantised layer's weight may be stored in another shape.
    """
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride == (1, 1) and module.groups == 1:
        return module.out_channels, module.in_channels, 1, 1
    return None


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the layers that can have an update, by name."""
    found = {name: shape_of(module) for name, module in model.named_modules()}
    return {name: shape for name, shape in found.items() if shape is not None}


def lora_layers(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """Yield the layers that have an update, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def compute_in_output_type(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Store the updates' weights in ``dtype``, and compute their matmuls in the activations' type in place.

    PEFT would cast the activations to the weights' type: fp32 matmuls, and fp32 activations saved for backward.
    """
    for _, layer in lora_layers(model):
        layer.cast_input_dtype_enabled = False
        for adapter in layer.lora_A:
            layer.lora_variant[adapter] = InPlaceLoraVariant()
            for pair in (layer.lora_A, layer.lora_B):
                pair[adapter].weight = nn.Parameter(pair[adapter].weight.detach().to(dtype))


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the updates' weights: ``{layer}.lora_A.weight`` [rank, i] and ``{layer}.lora_B.weight`` [o, rank].

    Those of a convolution have two more sides, of 1.
    """
    state = {}
    for name, layer in lora_layers(model):
        state[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight.detach()
        state[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight.detach()
    return state


@contextmanager
def updates_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the updates within this context; PEFT skips them."""
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def detach(model: nn.Module) -> None:
    """Remove every update and put the original layers back."""
    for name, layer in list(lora_layers(model)):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config  # otherwise PEFT takes the next update for a second adapter of the same name


def rescale(model: nn.Module, scale: float) -> None:
    """Set the scale of every update."""
    for _, layer in lora_layers(model):
        layer.scaling[ADAPTER] = scale


def move_updates(model: nn.Module, device: torch.device) -> None:
    """Move only the updates to a device: next to streamed weights, PEFT creates them in host memory."""
    for _, layer in lora_layers(model):
        for pair in (layer.lora_A, layer.lora_B):
            pair.to(device)
