"""Thumbnails of the crops that training sees, cached as files."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from simpletune.data.samples import Crop
from simpletune.data.sources.augmentation import UNCHANGED, Augmentation
from simpletune.data.sources.holes import hole_pixels
from simpletune.data.sources.image_files import crop_to_bucket, decode, decode_mask, image_size
from simpletune.data.sources.source import Mask, Source
from simpletune.models.shared.buckets import Size
from simpletune.system.atomic import atomic_file

SIDE = 256  # pixels of a thumbnail's longer side
AT_ONCE = threading.Semaphore(2)  # pictures that the page decodes, wherever: the largest takes a GiB
QUALITY = 80
VEIL = 0.85  # of white over what lies outside of a mask


def tile(
    image: Image.Image, bucket: Size, view: tuple[tuple[float, float], bool, Augmentation], side: int
) -> Image.Image:
    """Return a thumbnail of the crop that training sees, ``side`` pixels at its longer side.

    ``view``: position of the crop within the excess width and height, 0 to 1, whether it is mirrored, and its changes.
    """
    scale = side / max(bucket)
    size = (max(1, round(bucket[0] * scale)), max(1, round(bucket[1] * scale)))
    pixels = crop_to_bucket(image, size, *view)
    return Image.fromarray(((pixels.transpose(1, 2, 0) + 1) * 127.5).round().astype(np.uint8))


def grey_hole(small: Image.Image, view: Crop, place: int) -> Image.Image:
    """Fill the hole of a crop's thumbnail with grey, as the autoencoder sees it; ``place`` as for ``hole_pixels``.
    Raises UnusableImage if the hole's mask is unusable."""
    hole = Image.fromarray(hole_pixels(view, place)).resize(small.size, Image.Resampling.NEAREST)
    return Image.composite(Image.new("RGB", small.size, (128, 128, 128)), small, hole)


def thumbnail_of(
    read: Callable[[], bytes], version: str, source: Source, step: int, folder: Path, mask: Mask | None = None
) -> Path:
    """Return the file of a picture's thumbnail; make it if the picture is new or has changed.

    Shows the centre even if training crops at random; with a mask, what lies outside of it is nearly white. The folder
    may be removed at any time. ``version`` names the content of picture and mask.
    """
    cropped = (source.resolution, source.aspect, source.max_aspect, source.background, step, SIDE)
    key = repr((version, cropped, mask is not None))
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    kept = folder / name[:2] / f"{name}.webp"
    if kept.is_file():
        return kept
    with AT_ONCE:
        data = read()
        bucket = source.bucket(image_size(data), step)
        image = decode(data, 2 * SIDE, source.background)
        if mask is not None:
            learned = decode_mask(mask.read(), mask.kind).resize(image.size, Image.Resampling.BILINEAR)
            image = Image.composite(image, Image.blend(image, Image.new("RGB", image.size, "white"), VEIL), learned)
        small = tile(image, bucket, ((0.5, 0.5), False, UNCHANGED), SIDE)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(kept, shared=True) as part:
        small.save(part, "WEBP", quality=QUALITY, method=2)
    return kept
