"""Augmentation: colours and rotation of a picture's variants, drawn from (seed, picture, variant) as crops are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from simpletune.models.shared.buckets import Size
from simpletune.system.rng import stream

if TYPE_CHECKING:
    from PIL import Image

    from simpletune.data.sources.source import Source


@dataclass(frozen=True)
class Augmentation:
    """How a variant differs from its picture; 0: not at all. A new field takes the last place, so that the draws of the
    others stay.

    Args:
        brightness: factor of all values, less 1; likewise contrast and saturation, about their grey.
        hue: degrees around the colour wheel.
        rotation: degrees, counter-clockwise.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    rotation: float = 0.0

    def changes(self) -> dict[str, float]:
        """Return the fields that are not 0."""
        return {name: value for name, value in asdict(self).items() if value}


UNCHANGED = Augmentation()
RANGES = tuple(field.name for field in fields(Augmentation))
"""Fields of a source: the largest absolute value of each change."""
UNITS = {"hue": " degrees", "rotation": " degrees"}


def draw_augmentation(source: Source, seed: int, digest: str, variant: int) -> Augmentation:
    """Draw each change uniformly from its source's range. The first variant, which evaluations use, stays as it is."""
    limits = [getattr(source, name) for name in RANGES]
    if not variant or not any(limits):
        return UNCHANGED
    draws = stream(seed, "augmentation", digest, variant).uniform(-1, 1, len(limits))
    return Augmentation(*(float(limit * draw) for limit, draw in zip(limits, draws, strict=True)))


def format_augmentation(source: Source) -> str:
    """Format the ranges of a source that are not 0: ``brightness ±0.1, hue ±5 degrees``."""
    limits = {name: getattr(source, name) for name in RANGES}
    return ", ".join(f"{name} ±{limit:g}{UNITS.get(name, '')}" for name, limit in limits.items() if limit)


def recolour(image: Image.Image, augmentation: Augmentation) -> Image.Image:
    """Change the colours of an RGB picture: brightness, contrast, saturation, then hue, each as torchvision does."""
    from PIL import Image, ImageEnhance

    for enhance, amount in (
        (ImageEnhance.Brightness, augmentation.brightness),
        (ImageEnhance.Contrast, augmentation.contrast),
        (ImageEnhance.Color, augmentation.saturation),
    ):
        if amount:
            image = enhance(image).enhance(1 + amount)
    if augmentation.hue:
        hue, *others = image.convert("HSV").split()
        shift = round(augmentation.hue * 256 / 360)  # Pillow has 256 hues
        image = Image.merge("HSV", [hue.point([(level + shift) % 256 for level in range(256)]), *others]).convert("RGB")
    return image


def rotate(image: Image.Image, box: tuple[float, float, float, float], bucket: Size, degrees: float) -> Image.Image:
    """Scale a part of a picture to its bucket and rotate it about its centre.

    Enlarges it until the bucket lies within the rotated part: black corners or mirrored borders would be learned.
    """
    from PIL import Image

    (width, height), angle = bucket, math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    zoom = cos + max(width / height, height / width) * abs(sin)  # by which the bucket fits into its rotated self
    size = math.ceil(width * zoom), math.ceil(height * zoom)
    x, y = (size[0] - cos * width + sin * height) / 2, (size[1] - sin * width - cos * height) / 2  # keeps the centre
    scaled = image.resize(size, Image.Resampling.LANCZOS, box)
    return scaled.transform(bucket, Image.Transform.AFFINE, (cos, -sin, x, sin, cos, y), Image.Resampling.BICUBIC)
