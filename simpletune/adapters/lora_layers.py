"""Handle PEFT's LoRA layers inside a transformer: data type and state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from simpletune.adapters.dropout import UpdateDropout
from simpletune.adapters.layers import ADAPTER
from simpletune.adapters.lora_product import InPlaceLoraVariant


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the layers with a LoRA update, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


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


def drop_ranks(model: nn.Module, rank: float, module: float) -> None:
    """Add dropout on the ranks of every update and on whole updates; see ``UpdateDropout``."""
    for _, layer in lora_layers(model):
        layer.update_dropout = UpdateDropout(rank, module)


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the updates' weights: ``{layer}.lora_A.weight`` [rank, i] and ``{layer}.lora_B.weight`` [o, rank].

    Those of a convolution have two more sides, of 1.
    """
    state = {}
    for name, layer in lora_layers(model):
        state[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight.detach()
        state[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight.detach()
    return state
