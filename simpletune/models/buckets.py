"""Aspect-ratio buckets: sizes of about equal area, in steps of 16 px (8 of the autoencoder times 2 of the patches)."""

from __future__ import annotations

import math
from functools import lru_cache

STEP = 16

Size = tuple[int, int]
"""(width, height) in pixels."""


@lru_cache
def bucket_sizes(resolution: int, max_aspect: float) -> tuple[Size, ...]:
    """All bucket sizes for a resolution: for each width the largest height within the area, and the mirror images.

    Args:
        resolution: side of the square of the same area, in pixels.
        max_aspect: longest side over shortest side, at most.
    """
    sizes = set()
    for width in range(STEP, resolution * resolution // STEP + 1, STEP):
        height = resolution * resolution // width // STEP * STEP
        if height >= STEP and max(width / height, height / width) <= max_aspect:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def nearest_bucket(picture: Size, resolution: int, max_aspect: float) -> Size:
    """The bucket whose aspect ratio is nearest to a picture's; of equals the largest, then the narrowest."""
    aspect = math.log(picture[0] / picture[1])

    def distance(size: Size) -> tuple[float, int, int]:
        return abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size[0]

    return min(bucket_sizes(resolution, max_aspect), key=distance)


def upscaling(picture: Size, bucket: Size) -> float:
    """How much a picture is scaled up to cover a bucket; 1 or less: not at all."""
    return max(bucket[0] / picture[0], bucket[1] / picture[1])


def covering_size(picture: Size, bucket: Size) -> Size:
    """The smallest size with the picture's aspect ratio that covers a bucket."""
    scale = upscaling(picture, bucket)
    return max(bucket[0], round(picture[0] * scale)), max(bucket[1], round(picture[1] * scale))
