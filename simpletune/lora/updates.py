"""The update of one linear layer, and what becomes of it between layouts.

Shapes: o outputs, i inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """W + scale * up @ down.

    Args:
        down: [r, i].
        up: [o, r].
        scale: alpha / r.
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(o, i), as of the layer's weight."""
        return self.up.shape[0], self.down.shape[1]

    def delta(self) -> Tensor:  # fp32 [o, i]
        """What is added to the weight."""
        return self.scale * (self.up.float() @ self.down.float())

    def folded(self) -> Update:
        """The same with scale 1: the scale goes into ``up``, in its type."""
        if self.scale == 1.0:
            return self
        return Update(self.down, (self.up.float() * self.scale).to(self.up.dtype))


Updates = Mapping[str, Update]
"""Updates by diffusers' layer name."""


def swap_halves(update: Update) -> Update:
    """The halves of the outputs change places (scale before shift, shift before scale)."""
    return replace(update, up=torch.cat(update.up.chunk(2)[::-1]))


def fuse(parts: Sequence[Update | None]) -> Update:
    """The updates of q, k and v as one update of the layer that holds them one above the other.

    Where all share ``down``, it is kept: rank r. Else the downs are stacked and the ups stand on the diagonal: rank is
    their sum. A part that is None gets rows of zeros, and no rank. Parts of different scales are folded first.

    Args:
        parts: of q, k, v; at least one is not None; all of one shape.
    """
    present = [part for part in parts if part is not None]
    if len({part.scale for part in present}) > 1:
        parts = [part and part.folded() for part in parts]
        present = [part for part in parts if part is not None]
    first = present[0]
    if len(present) == len(parts) and all(_same(part.down, first.down) for part in present):
        return Update(first.down, torch.cat([part.up for part in present]), first.scale)
    rank, column = sum(part.rank for part in present), 0
    height = first.shape[0]
    up = first.up.new_zeros(len(parts) * height, rank)
    for number, part in enumerate(parts):
        if part is not None:
            up[number * height : (number + 1) * height, column : column + part.rank] = part.up
            column += part.rank
    return Update(torch.cat([part.down for part in present]), up, first.scale)


def split(update: Update, count: int = 3) -> list[Update | None]:
    """The parts of a fused update; the inverse of ``fuse`` up to rows and columns of zeros.

    Parts that use columns of their own get only those; a part without any is None. Where columns are shared (a tool
    trained the fused layer itself), each part keeps the whole ``down``.
    """
    ups = list(update.up.chunk(count))
    if update.rank % count == 0 and _is_diagonal(ups):
        downs = update.down.chunk(count)
        width = update.rank // count
        columns = [up[:, n * width : (n + 1) * width] for n, up in enumerate(ups)]
        return [Update(d, u.contiguous(), update.scale) for d, u in zip(downs, columns, strict=True)]
    used = torch.stack([(up != 0).any(dim=0) for up in ups])  # [count, r]
    if (used.sum(dim=0) > 1).any() or not used.any():
        return [Update(update.down, up.contiguous(), update.scale) for up in ups]
    return [
        Update(update.down[own], up[:, own].contiguous(), update.scale) if own.any() else None
        for up, own in zip(ups, used, strict=True)
    ]


def _is_diagonal(ups: Sequence[Tensor]) -> bool:
    """Whether part n is zero outside the n-th of equal blocks of columns."""
    width = ups[0].shape[1] // len(ups)
    for number, up in enumerate(ups):
        inside = slice(number * width, (number + 1) * width)
        if up[:, : inside.start].any() or up[:, inside.stop :].any():
            return False
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
