"""Select the pictures held out of training, solely by the hash of their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from simpletune.data.sources.source import Picture
from simpletune.system.options import UserError, plural

DIGITS = 13  # leading hexadecimal digits of a digest, read as a number in [0, 1): 52 bits, exact in a float


def position(digest: str) -> float:
    """Return a picture's SHA-256 mapped to [0, 1), uniformly distributed over pictures."""
    return int(digest[:DIGITS], 16) / 16**DIGITS


def split_pictures(pictures: Sequence[Picture], split: float | None) -> tuple[list[Picture], list[Picture]]:
    """Split pictures into those to train on and those to hold out, each in the given order.

    Args:
        pictures: the usable pictures. Identical files fall on the same side.
        split: ``validation.split``. A fraction below 1 holds out each picture whose hash lies below it; a whole number
            N holds out the pictures with the N lowest hashes; None holds out none.

    Raises:
        UserError: one side would be empty.
    """
    if split is None or not pictures:
        return list(pictures), []
    if split < 1:
        held = {picture.digest for picture in pictures if position(picture.digest) < split}
    else:
        held = set(sorted({picture.digest for picture in pictures})[: int(split)])
    training = [picture for picture in pictures if picture.digest not in held]
    held_out = [picture for picture in pictures if picture.digest in held]
    if not training or not held_out:
        raise UserError(_refusal(pictures, split, bool(training)))
    return training, held_out


def _refusal(pictures: Sequence[Picture], split: float, too_few: bool) -> str:
    """Explain why a split leaves one side empty, with a remedy."""
    different = len({picture.digest for picture in pictures})
    of = f"validation.split: {split} of {plural(different, 'picture')}"
    if different == 1:
        return f"{of}: a split needs at least one picture on each side. Add pictures, or use null"
    remedy = f"Use a whole number from 1 to {different - 1} (such as validation.split=1), or null"
    if too_few:
        return f"{of} holds out none: no picture's hash lies below it. {remedy}, or a larger fraction"
    return f"{of} leaves none to train on. {remedy}{', or a smaller fraction' if split < 1 else ''}"
