"""Aspect-ratio buckets: sizes of about equal area, in steps of 16 px (autoencoder's 8 times patch size 2)."""

from __future__ import annotations

import math
from functools import lru_cache

STEP = 16

Size = tuple[int, int]
"""(width, height) in pixels."""


@lru_cache
def bucket_sizes(resolution: int, max_aspect: float) -> tuple[Size, ...]:
    """All bucket sizes for a resolution: for each width the largest height within the area, and both transposed.

    Args:
        resolution: side of the square with the same area, in pixels.
        max_aspect: largest ratio of the longer to the shorter side.
    """
    sizes = set()
    for width in range(STEP, resolution * resolution // STEP + 1, STEP):
        height = resolution * resolution // width // STEP * STEP
        if height >= STEP and max(width / height, height / width) <= max_aspect:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def nearest_bucket(picture: Size, resolution: int, max_aspect: float) -> Size:
    """The bucket with the aspect ratio nearest to a picture's; breaks ties by larger area, then smaller width."""
    aspect = math.log(picture[0] / picture[1])

    def distance(size: Size) -> tuple[float, int, int]:
        return abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size[0]

    return min(bucket_sizes(resolution, max_aspect), key=distance)


def upscaling(picture: Size, bucket: Size) -> float:
    """The factor by which a picture is scaled up to cover a bucket; at most 1 if it is not."""
    return max(bucket[0] / picture[0], bucket[1] / picture[1])


def covering_size(picture: Size, bucket: Size) -> Size:
    """The smallest size with the picture's aspect ratio that covers a bucket."""
    scale = upscaling(picture, bucket)
    return max(bucket[0], round(picture[0] * scale)), max(bucket[1], round(picture[1] * scale))
