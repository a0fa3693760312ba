"""Prepare pictures as the encoders' papers do, with Pillow's antialiased filters.

Legend: n pictures, s side of the encoder's input in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Norm = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and standard deviation of red, green and blue."""

IMAGENET: Norm = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP: Norm = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # arXiv:2103.00020's code
HALF: Norm = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def scaled_and_cut(picture: Image.Image, shorter: int, side: int) -> Image.Image:
    """Scale a picture's shorter side by a bicubic filter, keeping its aspect ratio, and crop the centre square.

    Args:
        picture: picture of any size and mode.
        shorter: length of the shorter side in pixels after scaling.
        side: side of the square, at most ``shorter``.
    """
    width, height = picture.size
    scale = shorter / min(width, height)
    # as torchvision, which the papers' code uses: round the longer side down to whole pixels
    size = (shorter, int(height * scale)) if width <= height else (int(width * scale), shorter)
    scaled = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    return scaled.crop((left, top, left + side, top + side))


def squashed(picture: Image.Image, side: int, chosen: Image.Resampling) -> Image.Image:
    """Scale a picture to a square by a filter, changing its aspect ratio."""
    return picture.convert("RGB").resize((side, side), chosen)


def normalise(pictures: Sequence[Image.Image], norm: Norm) -> Tensor:  # [n, 3, s, s]
    """Stack pictures of one size and normalise their values."""
    values = torch.from_numpy(np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures]))
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in norm)
    return (values.permute(0, 3, 1, 2) / 255 - mean) / deviation
