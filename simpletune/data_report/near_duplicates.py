"""Pictures that are alike: a difference hash (signs of the brightness's slope, 8 x 8) and a thumbnail of colours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

BITS = 5  # of 64 that may differ
COLOURS = 8.0  # of 255 that the thumbnails may differ on average
BLOCK = 1024  # pictures that are compared with all others at once


@dataclass(frozen=True)
class PictureHash:
    """What a picture is compared by.

    Args:
        bits: of the difference hash.
        colours: 8 x 8 mean colours, 192 bytes.
    """

    bits: int
    colours: bytes


def hash_of(image: Image.Image) -> PictureHash:
    """The hash of an RGB picture."""
    import numpy as np
    from PIL import Image

    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    rising = (grey[:, 1:] > grey[:, :-1]).ravel()
    small = image.resize((8, 8), Image.Resampling.BOX)
    return PictureHash(int.from_bytes(np.packbits(rising).tobytes(), "big"), small.tobytes())


def near_duplicates(hashes: Sequence[PictureHash]) -> list[list[int]]:
    """Groups of pictures that are nearly the same, by their places.

    Args:
        hashes: of each picture.

    Returns:
        Groups of two and more; what is alike by way of a third stands in one group.
    """
    import numpy as np

    bits = np.array([each.bits for each in hashes], dtype=np.uint64)
    joined = np.arange(len(bits))
    for start in range(0, len(bits), BLOCK):
        distances = np.bitwise_count(bits[start : start + BLOCK, None] ^ bits[None, :])
        for row, column in np.argwhere(distances <= BITS):
            one, other = start + int(row), int(column)
            if one < other and _same_colours(hashes[one], hashes[other]):
                _join(joined, one, other)
    groups = defaultdict(list)
    for place in range(len(bits)):
        groups[_root(joined, place)].append(place)
    return [group for group in groups.values() if len(group) > 1]


def _same_colours(one: PictureHash, other: PictureHash) -> bool:
    import numpy as np

    first, second = (np.frombuffer(each.colours, dtype=np.uint8).astype(np.int16) for each in (one, other))
    return float(np.abs(first - second).mean()) <= COLOURS


def _root(joined: np.ndarray, place: int) -> int:
    while joined[place] != place:
        place = int(joined[place])
    return place


def _join(joined: np.ndarray, one: int, other: int) -> None:
    first, second = sorted((_root(joined, one), _root(joined, other)))
    joined[second] = first
