"""Select the pictures held out of training, solely by the hash of their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from simpletune.data.sources.source import Picture
from simpletune.system.options import UserError, plural

DIGITS = 13  # leading hexadecimal digits of a digest, read as a number in [0, 1): 52 bits, exact in a float


def split_pictures(pictures: Sequence[Picture], split: float | None) -> tuple[list[Picture], list[Picture]]:
    """Split pictures into those to train on and those to hold out, each in the given order, by ``validation.split``.
    Identical files fall on the same side. UserError: one side would be empty."""
    if split is None or not pictures:
        return list(pictures), []
    if split < 1:  # pictures whose hash lies below it; a whole number N: those with the N lowest hashes
        held = {picture.digest for picture in pictures if int(picture.digest[:DIGITS], 16) / 16**DIGITS < split}
    else:
        held = set(sorted({picture.digest for picture in pictures})[: int(split)])
    training = [picture for picture in pictures if picture.digest not in held]
    held_out = [picture for picture in pictures if picture.digest in held]
    if training and held_out:
        return training, held_out
    different = len({picture.digest for picture in pictures})
    of = f"validation.split: {split} of {plural(different, 'picture')}"
    if different == 1:
        raise UserError(f"{of}: a split needs at least one picture on each side. Add pictures, or use null")
    remedy = f"Use a whole number from 1 to {different - 1} (such as validation.split=1), or null"
    if training:
        raise UserError(f"{of} holds out none: no picture's hash lies below it. {remedy}, or a larger fraction")
    raise UserError(f"{of} leaves none to train on. {remedy}{', or a smaller fraction' if split < 1 else ''}")
