"""Rectified flow with a U-Net as forks of sd-scripts train it, written from a description of their step.

The fork is bluvoll/sd-scripts at d782143 (library/train_util.py and sdxl_train.py): levels are uniform, shifted by a
ratio; the network is told 999 sigma, rounded down; the target is noise - z_0; the loss is the mean squared error.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """What the network is given, and what it should answer."""

    z_t: Tensor  # [b, c, h, w]
    time: Tensor  # [b]
    target: Tensor  # [b, c, h, w]


def shifted(uniform: Tensor, ratio: float) -> Tensor:
    """Levels in [0, 1) from uniform draws [n]."""
    return ratio * uniform / (1 + (ratio - 1) * uniform)


def ratio_of(width: int, height: int, base_pixels: float = 1024.0 * 1024.0) -> float:
    """The ratio of a picture's size in pixels, where none is given."""
    return math.sqrt(width * height / base_pixels)


def inputs(z_0: Tensor, noise: Tensor, sigma: Tensor, rounds: bool = True) -> Inputs:
    """Of one micro-batch at levels [b]; the noisy latents have the level itself, only the time is rounded.

    ComfyUI's ModelSamplingSD3, with which the models draw, tells the network 1000 sigma.
    """
    time = torch.clamp((sigma * 999).long(), 0, 999) if rounds else 1000 * sigma
    wide = sigma.view(-1, 1, 1, 1)
    return Inputs(wide * noise + (1.0 - wide) * z_0, time, noise - z_0)


def loss(network: Callable[[Tensor, Tensor], Tensor], given: Inputs) -> Tensor:
    return F.mse_loss(network(given.z_t, given.time).float(), given.target.float(), reduction="mean")
