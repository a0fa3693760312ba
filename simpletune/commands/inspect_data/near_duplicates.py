"""Find near-duplicates by a difference hash (the signs of 8 x 8 brightness gradients) and a colour thumbnail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

BITS = 5  # of 64 bits that may differ
COLOURS = 8.0  # largest mean difference between thumbnails, out of 255
COMPARED = 50_000  # distinct hashes compared with each other; the time grows with the square


@dataclass(frozen=True)
class ImageHash:
    """The hash by which pictures are compared."""

    bits: int  # the difference hash
    colours: bytes  # 8 x 8 mean colours, 192 bytes


def hash_of(image: Image.Image) -> ImageHash:
    import numpy as np
    from PIL import Image

    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    rising = (grey[:, 1:] > grey[:, :-1]).ravel()
    small = image.resize((8, 8), Image.Resampling.BOX)
    return ImageHash(int.from_bytes(np.packbits(rising).tobytes(), "big"), small.tobytes())


def near_duplicates(hashes: Sequence[ImageHash]) -> list[list[int]]:
    """Group the indices of nearly identical pictures, at least two each; those similar to a third share its group.

    Beyond ``COMPARED`` distinct hashes, only equal ones are grouped.
    """
    places = defaultdict(list)
    for place, each in enumerate(hashes):
        places[each].append(place)
    grouped = [
        sorted(place for each in group for place in places[each]) for group in _group_similar(list(places)[:COMPARED])
    ]
    left_over = [places[each] for each in list(places)[COMPARED:]]
    return sorted(group for group in [*grouped, *left_over] if len(group) > 1)


def _group_similar(hashes: Sequence[ImageHash]) -> list[list[ImageHash]]:
    """Group distinct hashes by transitive similarity.

    A group grows from one hash: move the hashes similar to it out of the rest, then search the rest for hashes similar
    to those. So each hash costs one pass over the remaining hashes, and no pair within a group is compared twice.
    """
    import numpy as np

    bits = np.array([each.bits for each in hashes], dtype=np.uint64)
    colours = np.frombuffer(b"".join(each.colours for each in hashes), dtype=np.uint8).reshape(len(hashes), -1, 3)
    means = colours.mean(axis=1, dtype=np.float32)
    left, groups = np.arange(len(hashes)), []
    while len(left):
        group, waiting, left = [], [int(left[0])], left[1:]
        while waiting:
            here = waiting.pop()
            group.append(hashes[here])
            close = np.bitwise_count(bits[left] ^ bits[here]) <= BITS
            close[close] = np.abs(means[left[close]] - means[here]).mean(axis=1) <= COLOURS + 0.01  # a lower bound
            away = np.abs(colours[left[close]].astype(np.int16) - colours[here].astype(np.int16))  # [n, 64, 3]
            close[close] = away.mean(axis=(1, 2)) <= COLOURS
            waiting += left[close].tolist()
            left = left[~close]
        groups.append(group)
    return groups
