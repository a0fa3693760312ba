"""Holes: the parts of pictures that an inpainting model learns to paint, drawn from (seed, picture, variant) as crops
are.

Shapes and sizes are those of LaMa's large masks (arXiv:2109.07161), with which SD 2's inpainting model was trained; as
for SD 1.5's, a quarter of the holes are whole pictures (both by their model cards).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from simpletune.data.sources.masks import mask_pixels
from simpletune.data.sources.source import Hole
from simpletune.models.shared.buckets import Size
from simpletune.system.rng import stream

if TYPE_CHECKING:
    import numpy as np

    from simpletune.data.samples import Crop
    from simpletune.data.sources.source import Source

WHOLE = 0.25  # share of whole pictures; the others are rectangles and strokes, half each
SIDE = 256  # pixels of the square in which LaMa's sizes are given
RECTANGLES, RECTANGLE, MARGIN = 3, (30, 150), 10  # at most; sides; distance from the border
STROKES, LINES, LINE, WIDTH = 5, 5, (10, 210), (5, 105)  # at most, and lines in each; lengths and widths


def draw_hole(source: Source, seed: int, digest: str, variant: int) -> Hole:
    """Draw the hole of one variant of a picture, by the source's ``inpainting_mask``."""
    if source.inpainting_mask == "own":
        return Hole("own")
    draw = stream(seed, "hole", digest, variant)
    share, number = draw.random(), int(draw.integers(2**63))
    if share < WHOLE:
        return Hole("whole")
    return Hole("rectangles" if share < (1 + WHOLE) / 2 else "strokes", number)


def hole_pixels(view: Crop, place: int) -> np.ndarray:
    """Render the hole of a crop that has one, in its pixels: bool [h, w], True inside. A random one covers a latent's
    place of ``place`` pixels a side. Raises UnusableImage if its mask is unusable."""
    import numpy as np

    assert view.hole is not None
    width, height = view.bucket
    match view.hole.kind:
        case "whole":
            return np.ones((height, width), dtype=bool)
        case "own":
            return mask_pixels(view) >= 127.5  # diffusers' threshold, 0.5
        case "rectangles":
            return _rectangles(view.bucket, place, stream(view.hole.draw, "rectangles"))
        case "strokes":
            return _strokes(view.bucket, place, stream(view.hole.draw, "strokes"))


def latent_hole(pixels: np.ndarray, place: int) -> np.ndarray:
    """Reduce a hole [h, w] to [h / place, w / place]: the first of place x place pixels (diffusers'
    ``interpolate``)."""
    return pixels[::place, ::place]


def _rectangles(bucket: Size, place: int, draw: np.random.Generator) -> np.ndarray:
    import numpy as np

    (width, height), scale = bucket, math.sqrt(math.prod(bucket)) / SIDE
    hole, margin = np.zeros((height, width), dtype=bool), round(MARGIN * scale)
    for _ in range(draw.integers(1, RECTANGLES, endpoint=True)):
        spans = []
        for side in (width, height):
            length = min(max(place, round(draw.uniform(*RECTANGLE) * scale)), side - 2 * margin)
            start = int(draw.integers(margin, side - margin - length, endpoint=True))
            spans.append(slice(start, start + length))
        hole[spans[1], spans[0]] = True
    return hole


def _strokes(bucket: Size, place: int, draw: np.random.Generator) -> np.ndarray:
    """Draw connected lines with round ends until they cover a latent: short ones can lie between them."""
    import numpy as np
    from PIL import Image, ImageDraw

    (width, height), scale = bucket, math.sqrt(math.prod(bucket)) / SIDE
    image = Image.new("1", bucket)
    pen = ImageDraw.Draw(image)
    while not latent_hole(np.array(image), place).any():
        for _ in range(draw.integers(1, STROKES, endpoint=True)):
            x, y = draw.uniform(0, width), draw.uniform(0, height)
            for _ in range(draw.integers(1, LINES, endpoint=True)):
                angle, length = draw.uniform(0, 2 * math.pi), draw.uniform(*LINE) * scale
                across = max(place, round(draw.uniform(*WIDTH) * scale))
                end_x = min(max(x + length * math.cos(angle), 0), width)
                end_y = min(max(y + length * math.sin(angle), 0), height)
                pen.line([(x, y), (end_x, end_y)], fill=1, width=across)
                for centre in ((x, y), (end_x, end_y)):
                    pen.circle(centre, across / 2, fill=1)
                x, y = end_x, end_y
    return np.array(image)
