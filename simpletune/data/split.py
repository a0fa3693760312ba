"""Select the pictures held out of training, solely by the hash of their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from simpletune.data.sources.source import SourceImage
from simpletune.system.options import UserError, plural

DIGITS = 13  # leading hexadecimal digits of a digest, read as a number in [0, 1): 52 bits, exact in a float


def split_images(images: Sequence[SourceImage], split: float | None) -> tuple[list[SourceImage], list[SourceImage]]:
    """Split pictures into those to train on and those to hold out, each in the given order, by ``validation.split``.
    Identical files fall on the same side. Raises UserError if one side would be empty."""
    if split is None or not images:
        return list(images), []
    if split < 1:  # pictures whose hash lies below it; a whole number N: those with the N lowest hashes
        held = {image.digest for image in images if int(image.digest[:DIGITS], 16) / 16**DIGITS < split}
    else:
        held = set(sorted({image.digest for image in images})[: int(split)])
    training = [image for image in images if image.digest not in held]
    held_out = [image for image in images if image.digest in held]
    if training and held_out:
        return training, held_out
    different = len({image.digest for image in images})
    of = f"validation.split: {split} of {plural(different, 'picture')}"
    if different == 1:
        raise UserError(f"{of}: a split needs at least one picture on each side. Add pictures, or use null")
    remedy = f"Use a whole number from 1 to {different - 1} (such as validation.split=1), or null"
    if training:
        raise UserError(f"{of} holds out none: no picture's hash lies below it. {remedy}, or a larger fraction")
    raise UserError(f"{of} leaves none to train on. {remedy}{', or a smaller fraction' if split < 1 else ''}")
