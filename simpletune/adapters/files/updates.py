"""Low-rank update of one linear layer or 1x1 convolution, and its conversion between layouts.

Shapes: o outputs, i inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from simpletune.adapters.files.module_kind import LORA
from simpletune.engine.tensors import exchanged_halves


@dataclass(frozen=True)
class LoraUpdate:
    """W + scale * up @ down.

    Args:
        down: [r, i].
        up: [o, r].
        scale: alpha / r.
        pointwise: whether the layer is a 1x1 convolution, whose factors files store with two more dimensions of size 1.
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0
    pointwise: bool = False
    kind: ClassVar[str] = LORA

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[0]

    @property
    def dim(self) -> int:
        """Number that readers divide alpha by: r."""
        return self.rank

    @property
    def shape(self) -> tuple[int, int]:
        """(o, i), the shape of the layer's weight."""
        return self.up.shape[0], self.down.shape[1]

    def delta(self) -> Tensor:  # fp32 [o, i]
        """Return the matrix added to the weight."""
        return self.scale * (self.up.float() @ self.down.float())

    def difference(self, weight: Tensor) -> Tensor:  # fp32 [o, i] -> [o, i]
        """Return what is added to a weight; here independent of it."""
        return self.delta()

    def folded(self) -> LoraUpdate:
        """Return the update with scale 1: the scale is folded into ``up``, in its type."""
        if self.scale == 1.0:
            return self
        return replace(self, up=(self.up.float() * self.scale).to(self.up.dtype), scale=1.0)

    def saved(self, factor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return a copy of a factor in the shape and type for a file."""
        copy = factor.to(dtype or factor.dtype, copy=True)  # layers may share down
        return copy[:, :, None, None] if self.pointwise else copy


Updates = Mapping[str, LoraUpdate]
"""Updates by diffusers' layer name."""


def swap_halves(update: LoraUpdate) -> LoraUpdate:
    """Swap the halves of the outputs (scale and shift)."""
    return replace(update, up=exchanged_halves(update.up))


def fuse(parts: Sequence[LoraUpdate | None]) -> LoraUpdate:
    """Fuse the updates of q, k and v into one update of the layer that stacks them.

    If all share ``down``, the result keeps it and has rank r. Otherwise it stacks the downs, puts the ups on the
    diagonal, and has the sum of their ranks. A part that is None gets rows of zeros and adds no rank. Parts with
    different scales are folded first.

    Args:
        parts: the updates of q, k, v with equal shapes; at least one is not None.
    """
    present = [part for part in parts if part is not None]
    if len({part.scale for part in present}) > 1:
        parts = [part and part.folded() for part in parts]
        present = [part for part in parts if part is not None]
    first = present[0]
    if len(present) == len(parts) and all(_same(part.down, first.down) for part in present):
        return LoraUpdate(first.down, torch.cat([part.up for part in present]), first.scale)
    rank, column = sum(part.rank for part in present), 0
    height = first.shape[0]
    up = first.up.new_zeros(len(parts) * height, rank)
    for number, part in enumerate(parts):
        if part is not None:
            up[number * height : (number + 1) * height, column : column + part.rank] = part.up
            column += part.rank
    return LoraUpdate(torch.cat([part.down for part in present]), up, first.scale)


def split(update: LoraUpdate, count: int = 3) -> list[LoraUpdate | None]:
    """Split a fused update; the inverse of ``fuse`` up to rows and columns of zeros.

    If no columns are shared, each part gets only its own, and a part without columns is None. If columns are shared,
    because a tool trained the fused layer itself, each part keeps the whole ``down``.
    """
    ups = list(update.up.chunk(count))
    if update.rank % count == 0 and _is_diagonal(ups):
        downs = update.down.chunk(count)
        width = update.rank // count
        columns = [up[:, n * width : (n + 1) * width] for n, up in enumerate(ups)]
        return [LoraUpdate(d, u.contiguous(), update.scale) for d, u in zip(downs, columns, strict=True)]
    used = torch.stack([(up != 0).any(dim=0) for up in ups])  # [count, r]
    if (used.sum(dim=0) > 1).any() or not used.any():
        return [LoraUpdate(update.down, up.contiguous(), update.scale) for up in ups]
    return [
        LoraUpdate(update.down[own], up[:, own].contiguous(), update.scale) if own.any() else None
        for up, own in zip(ups, used, strict=True)
    ]


def _is_diagonal(ups: Sequence[Tensor]) -> bool:
    """Whether each part n is zero outside the n-th block of columns, all equally wide."""
    width = ups[0].shape[1] // len(ups)
    for number, up in enumerate(ups):
        inside = slice(number * width, (number + 1) * width)
        if up[:, : inside.start].any() or up[:, inside.stop :].any():
            return False
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
