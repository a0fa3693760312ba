"""The shapes of LoKr's factors, without torch.

Shapes: o = l k outputs, i = m q inputs; W1 [l, m], W2 [k, q].
"""

from __future__ import annotations

import math


def factor_shapes(sides: tuple[int, int], factor: int, rank: int | None, both: bool) -> dict[str, tuple[int, int]]:
    """The shapes of an update's factors by name.

    Args:
        sides: (o, i).
        factor: bound of l and m; -1: the nearest to the root.
        rank: of a matrix's own two factors; a matrix without a side over twice the rank stays whole. None: both do.
        both: whether W1 may be decomposed too.
    """
    (left, below), (right, beyond) = ((share, size // share) for size in sides for share in [share_of(size, factor)])
    found = _maybe_decomposed("lokr_w1", (left, right), rank if both else None)
    return found | _maybe_decomposed("lokr_w2", (below, beyond), rank)


def share_of(size: int, factor: int) -> int:
    """The largest divisor of a side up to ``factor`` and up to its root; -1 leaves only the root."""
    most = math.isqrt(size) if factor < 0 else min(factor, math.isqrt(size))
    return next(divisor for divisor in range(most, 0, -1) if size % divisor == 0)


def _maybe_decomposed(name: str, shape: tuple[int, int], rank: int | None) -> dict[str, tuple[int, int]]:
    if rank is None or 2 * rank >= max(shape):
        return {name: shape}
    return {f"{name}_a": (shape[0], rank), f"{name}_b": (rank, shape[1])}
