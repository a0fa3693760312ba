"""Aspect-ratio buckets: sizes of about equal area, in steps that the model can process."""

from __future__ import annotations

import math
from functools import lru_cache

DOWNSAMPLING = 8  # of every family's autoencoder, in each direction
STEP = 16  # pixels: the autoencoder's 8 times at least 2; some families need more

Size = tuple[int, int]
"""(width, height) in pixels."""


@lru_cache
def bucket_sizes(resolution: int, max_aspect: float, step: int = STEP) -> tuple[Size, ...]:
    """All bucket sizes, in multiples of ``step`` pixels: for each width the largest height within the area of a square
    of side ``resolution``, and both transposed. ``max_aspect``: largest ratio of the longer to the shorter side."""
    sizes = set()
    for width in range(step, resolution * resolution // step + 1, step):
        height = resolution * resolution // width // step * step
        if height >= step and max(width / height, height / width) <= max_aspect:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def nearest_bucket(picture: Size, resolution: int, max_aspect: float, step: int = STEP) -> Size:
    """The bucket with the aspect ratio nearest to a picture's; breaks ties by larger area, then smaller width."""
    aspect, sizes = math.log(picture[0] / picture[1]), bucket_sizes(resolution, max_aspect, step)
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size[0]))


def upscaling(picture: Size, bucket: Size) -> float:
    """The factor by which a picture is scaled to cover a bucket; above 1 if that enlarges it."""
    return max(bucket[0] / picture[0], bucket[1] / picture[1])


def covering_size(picture: Size, bucket: Size) -> Size:
    """The smallest size with the picture's aspect ratio that covers a bucket."""
    scale = upscaling(picture, bucket)
    return max(bucket[0], round(picture[0] * scale)), max(bucket[1], round(picture[1] * scale))
