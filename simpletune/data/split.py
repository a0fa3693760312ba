"""Which pictures are held out of training: decided by the hash of a picture's bytes, by nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from simpletune.data.source import Picture
from simpletune.options import UserError, plural

DIGITS = 13  # hexadecimal digits of a digest that stand for a number in [0, 1): 52 bits, exact in a float


def position(digest: str) -> float:
    """Where a picture's SHA-256 lies between 0 and 1; even over many pictures."""
    return int(digest[:DIGITS], 16) / 16**DIGITS


def split_pictures(pictures: Sequence[Picture], split: float | None) -> tuple[list[Picture], list[Picture]]:
    """The pictures to train on, and those that are held out, each in the order given.

    Args:
        pictures: the usable ones. Those of the same bytes fall on the same side.
        split: ``validation.split``: a share below 1 holds out each picture whose hash lies below it; a whole number
            holds out the pictures with so many of the lowest hashes; None: none.

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
    """Why a split leaves one side empty, and what does not."""
    different = len({picture.digest for picture in pictures})
    of = f"validation.split: {split} of {plural(different, 'picture')}"
    if different == 1:
        return f"{of}: there must be one to train on and one to hold out. Add pictures, or use null"
    remedy = f"Use a whole number from 1 to {different - 1} (as validation.split=1), or null"
    if too_few:
        return f"{of} holds out none: no picture's hash lies below it. {remedy}, or a larger share"
    return f"{of} leaves none to train on. {remedy}{', or a smaller share' if split < 1 else ''}"
