"""Recognise what a picture of `pictures.draw` shows, by pixel statistics alone, without a learned model.

Legend: p and q are pixel rows and columns of the picture, taken at 64 x 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletune.data.demo.demo_scenes import (
    BACKGROUNDS,
    COLOURS,
    OUTLINE,
    POSITIONS,
    RGB,
    SIZES,
    STRIPE_PERIOD,
    TINT,
    Scene,
    outline_colour,
)
from simpletune.data.demo.shapes import DISTANCES, Field

PIXELS = 64
ATTRIBUTES = ("shape", "colour", "background", "size", "position", "style")

_UNEVEN = 3.0  # standard deviation of a painted background, out of 255
_NEAR = 34.0  # maximum distance of a pixel from a colour to match it, in units of 255 per channel
_OUTLINED = 0.3  # minimum share of the rim in the outline's colour for stripes; noise reaches 0.22
_CONTRAST = 0.25  # standard deviation of the figure between its colour (0) and its tint (1)
_EXPLAINED = 0.13  # minimum share of that variance in one wave; a square wave has 0.81, noise 0.02
_ANGLES, _TIMES = np.arange(12) * np.pi / 12, (0.5, 0.625, 0.8, 1.0, 1.25, 1.6, 2.0)
_WAVES = [(angle, STRIPE_PERIOD * times) for angle in _ANGLES for times in _TIMES]
"""Directions (every 15 degrees, 0 along x) and periods (fractions of the side) that the stripes' wave must beat."""
_STRIPES = [wave for wave in _WAVES if abs(wave[0] - np.pi / 4) < 0.27 and 0.79 < wave[1] / STRIPE_PERIOD < 1.26]
"""The style's own waves: models draw them up to 15 degrees and a quarter of a period off."""

Mask = NDArray[np.bool_]  # [p, q]
Pixels = NDArray[np.float64]  # [n, 3]


@dataclass(frozen=True)
class Reading:
    """What a picture appears to show: the fields of a `Scene`, and how well the shape fits."""

    shape: str
    colour: str
    background: str
    size: str
    position: str
    style: str
    fit: float
    """Intersection over union of the figure and the best shape; below about 0.7 no shape is clear."""


def read_image(image: Image.Image) -> Reading:
    """Read a picture of any size.

    Args:
        image: One figure on one background, drawn by `pictures.draw` or by a model.
    """
    resized = image.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BOX)
    canvas = np.asarray(resized, dtype=np.float64)  # [p, q, 3]
    ground = np.median(_border(canvas), axis=0)  # [3]
    background = _nearest(ground, BACKGROUNDS)
    line = _array(outline_colour(background))
    apart = _despeckled(np.linalg.norm(canvas - ground, axis=-1) > 2.0 * _NEAR)
    colour = _figure_colour(canvas[apart])
    fill = _array(COLOURS[colour])
    tint = fill + (255.0 - fill) * TINT
    striped = _is_striped(canvas, _box(apart), [fill, tint, line, ground])
    mask = _despeckled(_nearer_to_any(canvas, [fill, tint, line] if striped else [fill], ground))
    style = "striped" if striped else "painted" if _unevenness(canvas, mask) > _UNEVEN else "flat"
    shape, radius, centre, fit = _best_shape(mask, OUTLINE if striped else 0.0)
    size = min(SIZES, key=lambda name: abs(SIZES[name] - radius))
    position = min(POSITIONS, key=lambda name: float(np.hypot(*(np.array(POSITIONS[name]) - centre))))
    return Reading(shape, colour, background, size, position, style, fit)


def score(images: Sequence[Image.Image], scenes: Sequence[Scene]) -> dict[str, float]:
    """Compute the share of pictures that show the requested value, for each of `ATTRIBUTES`.

    Args:
        images: One picture per scene, in order.
        scenes: The requested scenes.

    Raises:
        ValueError: The numbers differ or are zero.
    """
    if len(images) != len(scenes) or not images:
        raise ValueError(
            f"{len(images)} pictures for {len(scenes)} scenes. Give one picture per scene, and at least one."
        )
    readings = [read_image(image) for image in images]
    return {
        name: sum(getattr(r, name) == getattr(s, name) for r, s in zip(readings, scenes, strict=True)) / len(scenes)
        for name in ATTRIBUTES
    }


def _array(colour: RGB) -> Field:
    return np.array(colour, dtype=np.float64)  # [3]


def _border(canvas: Field) -> Pixels:
    frame = np.ones((PIXELS, PIXELS), dtype=bool)
    frame[2:-2, 2:-2] = False
    return np.asarray(canvas[frame])


def _box(mask: Mask) -> Mask:
    """Return the bounding box of a mask, as a mask."""
    rows, columns = np.asarray(mask.any(axis=1)), np.asarray(mask.any(axis=0))
    return np.asarray(_spanned(rows)[:, None] & _spanned(columns))


def _spanned(line: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Fill from the first to the last set element."""
    return np.asarray(np.maximum.accumulate(line) & np.maximum.accumulate(line[::-1])[::-1])


def _nearest(value: Field, table: dict[str, RGB]) -> str:
    return min(table, key=lambda name: float(np.linalg.norm(value - _array(table[name]))))


def _closeness(pixels: Pixels, colour: Field) -> float:
    """Count the pixels near a colour; those at a distance of `_NEAR` count 0.6."""
    return float(np.exp(-0.5 * np.sum((pixels - colour) ** 2, axis=-1) / _NEAR**2).sum())


def _figure_colour(figure: Pixels) -> str:
    return max(COLOURS, key=lambda name: _closeness(figure, _array(COLOURS[name])))


def _is_striped(canvas: Field, box: Mask, kinds: Sequence[Field]) -> bool:
    """Whether a figure has an outline and, inside it, stripes of the style's direction and period.

    Args:
        canvas: the picture [p, q, 3].
        box: bounding box of the figure.
        kinds: the colours [3] of figure, tint, outline and background.
    """
    nearest = np.linalg.norm(canvas[:, :, None] - np.stack(kinds), axis=-1).argmin(axis=-1)  # [p, q]
    inside, inked = box & (nearest < 2), box & (nearest == 2)
    rim = _grown(_grown(inside)) & ~inside
    if not rim.any() or inked[rim].mean() < _OUTLINED:
        return False
    fill, tint = kinds[:2]
    paleness = np.clip((canvas[inside] - fill) @ (tint - fill) / np.sum((tint - fill) ** 2), -0.25, 1.25)  # [n]
    if paleness.std() < _CONTRAST:
        return False
    y, x = (np.argwhere(inside).T + 0.5) / PIXELS  # [n] each
    own = max(_explained(paleness, x, y, wave) for wave in _STRIPES)
    return own >= _EXPLAINED and all(_explained(paleness, x, y, wave) <= own for wave in _WAVES)


def _explained(values: Field, x: Field, y: Field, wave: tuple[float, float]) -> float:
    """Return the share of the variance of values [n] at x, y [n] that a sine of any phase explains (least squares).

    Args:
        wave: direction in radians, 0 along x, and period.
    """
    angle, period = wave
    turn = 2.0 * np.pi * (np.cos(angle) * x + np.sin(angle) * y) / period
    basis = np.stack([np.cos(turn), np.sin(turn), np.ones_like(turn)], axis=1)  # [n, 3]
    rest = values - basis @ np.linalg.lstsq(basis, values)[0]
    return float(1.0 - rest.var() / values.var())


def _grown(mask: Mask) -> Mask:
    """Dilate a mask by its four neighbours."""
    padded = np.pad(mask, 1)
    return np.asarray(mask | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:])


def _nearer_to_any(canvas: Field, parts: Sequence[Field], ground: Field) -> Mask:
    nearest = np.min([np.linalg.norm(canvas - part, axis=-1) for part in parts], axis=0)
    return nearest < np.linalg.norm(canvas - ground, axis=-1)


def _despeckled(mask: Mask) -> Mask:
    padded = np.pad(mask, 1)
    neighbours = sum(padded[i : i + PIXELS, j : j + PIXELS].astype(int) for i in range(3) for j in range(3))
    return np.asarray(mask & (neighbours >= 3))


def _unevenness(canvas: Field, mask: Mask) -> float:
    """Return the standard deviation of brightness over 4 x 4 blocks of background away from the figure, out of 255.

    An autoencoder's noise averages out within a block; brush strokes do not.
    """
    blocks = (PIXELS // 4, 4, PIXELS // 4, 4)
    padded = np.pad(mask, 1)
    near = np.any([padded[i : i + PIXELS, j : j + PIXELS] for i in range(3) for j in range(3)], axis=0)
    apart = ~near.reshape(blocks).any(axis=(1, 3))
    brightness = canvas.mean(axis=-1).reshape(blocks).mean(axis=(1, 3))  # [p/4, q/4]
    return float(brightness[apart].std()) if apart.any() else 0.0


@cache
def _unit_box(shape: str) -> tuple[float, float, float, float]:
    """Return left, right, top, bottom of a shape of radius 1."""
    y, x = np.mgrid[-1.25:1.25:251j, -1.25:1.25:251j]
    inside = DISTANCES[shape](x, y) < 0.0
    return float(x[inside].min()), float(x[inside].max()), float(y[inside].min()), float(y[inside].max())


def _best_shape(mask: Mask, margin: float) -> tuple[str, float, Field, float]:
    """Find the shape, radius and centre (x, y) with the best intersection over union, and return that too."""
    if not mask.any():
        return next(iter(DISTANCES)), 0.0, np.array([0.5, 0.5]), 0.0
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    left, right = columns[0] / PIXELS + margin, (columns[-1] + 1) / PIXELS - margin
    top, bottom = rows[0] / PIXELS + margin, (rows[-1] + 1) / PIXELS - margin
    y, x = (np.mgrid[:PIXELS, :PIXELS] + 0.5) / PIXELS
    best = ("", 0.0, np.array([0.5, 0.5]), -1.0)
    for shape, distance in DISTANCES.items():
        unit_left, unit_right, unit_top, unit_bottom = _unit_box(shape)
        radius = ((right - left) / (unit_right - unit_left) + (bottom - top) / (unit_bottom - unit_top)) / 2
        radius = max(radius, 1.0 / PIXELS)
        centre_x = (left + right - radius * (unit_left + unit_right)) / 2
        centre_y = (top + bottom - radius * (unit_top + unit_bottom)) / 2
        expected = distance((x - centre_x) / radius, (y - centre_y) / radius) * radius < margin
        fit = float((mask & expected).sum() / (mask | expected).sum())
        if fit > best[3]:
            best = (shape, radius, np.array([centre_x, centre_y]), fit)
    return best
