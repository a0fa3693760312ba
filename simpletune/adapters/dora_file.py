"""The tensors of a DoRA layer in a file that several tools apply exactly.

diffusers (PEFT) reads the magnitude m and divides by ||W + s B A||. ComfyUI does not know that key; its own,
``dora_scale``, it divides by ||W|| instead (ComfyUI #15458). So ``dora_scale`` is written as m ||W|| / ||W + s B A||,
by which ComfyUI computes the trained weight W', and W + k (W' - W) at strength k. diffusers drops that key of SD3's
files. Only diffusers' layout has both: of a U-Net's kohya layout diffusers takes ``dora_scale`` for m.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simpletune.adapters.dora_layers import DoraLayer
from simpletune.models.lora_names import ALPHA, DORA_SCALE, DOWN, MAGNITUDE, UP, Layout

MARK = {"simpletune_dora_scale": "m ||W|| / ||W + s B A||"}
"""In the header of a file whose ``dora_scale`` is made for ComfyUI."""


def tensors_of_layer(name: str, layer: DoraLayer, layout: Layout) -> dict[str, Tensor]:
    """One layer's tensors by key.

    Args:
        name: diffusers' name of the layer.
        layer: with its update.
        layout: diffusers' layout gets the scale folded into the second factor; kohya's gets alpha.
    """
    down, up = layer.lora_A.weight.detach(), layer.lora_B.weight.detach()
    if not layout.alpha:
        up = (up.float() * layer.scale).to(up.dtype)
    scale = layer.exact_gains() * layer.squares.sqrt()
    state = {DOWN: down, UP: up, DORA_SCALE: scale[:, None]}
    if layer.pointwise:
        state = {role: tensor[:, :, None, None] for role, tensor in state.items()}
    if layout.alpha:
        state[ALPHA] = torch.tensor(layer.scale * down.shape[0])
    else:
        state[MAGNITUDE] = layer.magnitude.detach()
    return {layout.key(name, role): tensor for role, tensor in state.items()}
