"""Aspect-ratio buckets: sizes of about equal area, in steps that the model can process."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

STEP = 16  # pixels; the least ``multiple`` of a family

Size = tuple[int, int]
"""(width, height) in pixels."""


@lru_cache
def bucket_sizes(resolution: int, max_aspect: float, step: int = STEP) -> tuple[Size, ...]:
    """List all bucket sizes, in multiples of ``step`` pixels: for each width the largest height within the area of a
    square of side ``resolution``, and both transposed. ``max_aspect``: the largest ratio of longer to shorter side."""
    sizes = set()
    for width in range(step, resolution * resolution // step + 1, step):
        height = resolution * resolution // width // step * step
        if height >= step and max(width / height, height / width) <= max_aspect:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def nearest_bucket(image: Size, resolution: int, max_aspect: float, step: int = STEP) -> Size:
    """Return the bucket with the aspect ratio nearest to a picture's; break ties by larger area, then smaller width."""
    aspect, sizes = math.log(image[0] / image[1]), bucket_sizes(resolution, max_aspect, step)
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size[0]))


def upscaling(image: Size, bucket: Size) -> float:
    """Return the factor by which a picture is scaled to cover a bucket; above 1 if that enlarges it."""
    return max(bucket[0] / image[0], bucket[1] / image[1])


def covering_size(image: Size, bucket: Size) -> Size:
    """Return the smallest size with the picture's aspect ratio that covers a bucket."""
    scale = upscaling(image, bucket)
    return max(bucket[0], round(image[0] * scale)), max(bucket[1], round(image[1] * scale))


class Framing(NamedTuple):
    """How a picture was cut, in pixels, which some models are told (micro-conditioning; arXiv:2307.01952, section
    2.2)."""

    original: Size  # before scaling
    crop: tuple[int, int]  # (left, top) of what was kept of the scaled picture, mirrored with it
    target: Size

    @classmethod
    def whole(cls, size: Size) -> Framing:
        """Return the framing of a picture that was neither scaled nor cropped, as generated ones are to look."""
        return cls(size, (0, 0), size)


def crop_corner(image: Size, bucket: Size, offset: tuple[float, float]) -> tuple[int, int]:
    """Return (left, top) of a crop in the picture that was scaled to cover its bucket. ``offset``: position within the
    excess width and height, 0 to 1."""
    width, height = covering_size(image, bucket)
    # Half a pixel is dropped, where train_text_to_image_lora_sdxl.py rounds it to the even number. Crops are cached by
    # their offset, so another rounding would need other keys, and change losses.
    return int((width - bucket[0]) * offset[0]), int((height - bucket[1]) * offset[1])


def framing_of(image: Size, bucket: Size, offset: tuple[float, float], flip: bool) -> Framing:
    """Return the framing of a crop; see ``crop_corner``."""
    left, top = crop_corner(image, bucket, offset)
    right = covering_size(image, bucket)[0] - bucket[0] - left
    return Framing(image, (right if flip else left, top), bucket)
