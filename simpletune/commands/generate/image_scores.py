"""Measure how pictures differ and how well they match prompts: plain distances, and scores by chosen encoders."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from simpletune.commands.evaluate.encoders.encoder import ImageEncoder
from simpletune.commands.evaluate.encoders.loading import find_encoder, load_encoder

KINDS = {"--clip": ("clip",), "--dino": ("dino", "dinov2")}
"""The kinds of encoders that each option takes."""

Measure = Literal["difference_from_base", "latent_distance_from_base", "clip_prompt", "clip_base", "dino_base"]


class ModelFigures(TypedDict):
    """One model's times and its pictures' distances from the base's, as in ``compare.json``."""

    weights: str
    title: str
    precision: str
    seconds_per_picture: float
    seconds: dict[str, float]
    difference_from_base: list[float]
    latent_distance_from_base: list[float]
    clip_prompt: NotRequired[list[float]]
    clip_base: NotRequired[list[float]]
    dino_base: NotRequired[list[float]]


def pixel_difference(a: Image.Image, b: Image.Image) -> float:
    """Mean absolute difference of two pictures' values, 0 to 1."""
    return float(np.abs(np.asarray(a, dtype=np.float32) - np.asarray(b, dtype=np.float32)).mean() / 255)


def latent_distance(a: Tensor, b: Tensor) -> float:
    """Root mean square difference of two latents; latents have a variance of about 1."""
    return float((a - b).square().mean().sqrt())


def open_encoder(option: str, name: str, device: torch.device) -> ImageEncoder:
    """Load the encoder that ``--clip`` or ``--dino`` names."""
    return load_encoder(find_encoder(name, option, KINDS[option]), device)
