"""How a step's micro-batches are dealt, and their gradients summed, written with bit-reversed numbers in one array."""

from __future__ import annotations

import numpy as np


def reversed_bits(number: int, width: int) -> int:
    """The number whose ``width`` binary digits are those of ``number`` from right to left."""
    return int(format(number, f"0{width}b")[::-1], 2) if width else 0


def width_of(count: int) -> int:
    """Levels of the smallest binary tree with ``count`` leaves."""
    return max(0, int(np.ceil(np.log2(count))))


def slots(areas: list[int]) -> list[int | None]:
    """The micro-batch at each leaf of the tree, from left to right; None: there is none.

    The one with the k-th most pixels (the earlier one of equals) lies at the reverse of k.
    """
    width = width_of(len(areas))
    found: list[int | None] = [None] * 2**width
    for rank, place in enumerate(np.argsort(-np.array(areas), kind="stable")):
        found[reversed_bits(rank, width)] = int(place)
    return found


def tree_sum(gradients: list[np.ndarray], areas: list[int]) -> np.ndarray:
    """The sum of fp32 gradients by the tree: neighbours first."""
    row = [None if place is None else gradients[place].astype(np.float32) for place in slots(areas)]
    while len(row) > 1:
        pairs = zip(row[::2], row[1::2], strict=True)
        row = [b if a is None else a if b is None else (a + b).astype(np.float32) for a, b in pairs]
    assert row[0] is not None
    return row[0]


def share(areas: list[int], process: int, processes: int) -> list[int]:
    """The micro-batches of one process: those of a whole aligned subtree, from left to right."""
    found, levels = slots(areas), width_of(processes)
    size = len(found) // processes
    first = reversed_bits(process, levels) * size
    return [place for place in found[first : first + size] if place is not None]
