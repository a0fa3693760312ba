"""Interface of updates of one layer in a file; LoRA's, and its conversion between layouts.

Shapes: o outputs, i inputs, r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from simpletune.adapters.files.module_kind import LORA
from simpletune.engine.tensors import exchanged_halves
from simpletune.models.shared.lora_names import DOWN, UP
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from simpletune.adapters.methods.layers import UpdateLayer


class Update(ABC):
    """How a file changes one linear layer or 1x1 convolution. Members are frozen dataclasses of the file's tensors."""

    kind: ClassVar[str]
    """LoRA, LoKr, LoHa, DoRA or OFT."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(o, i), the shape of the layer's weight; i is 0 if the file does not tell it."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Largest rank that the update can have: the rank of an equivalent LoRA."""

    @property
    def dim(self) -> int | None:
        """Number that readers divide alpha by; None: they ignore alpha."""
        return self.rank

    @property
    def scale(self) -> float:
        """The factor on the product of the factors."""
        return 1.0

    @property
    def pointwise(self) -> bool:
        """Whether the layer is a 1x1 convolution."""
        return False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the layer's weight may have this shape, (o, i) or (o, i, 1, 1)."""
        outputs, inputs = self.shape
        return (outputs, inputs or shape[1]) == (shape[0], shape[1])

    def delta(self) -> Tensor:  # fp32 [o, i]
        """Return the matrix that it adds to any weight.

        Raises:
            UserError: it depends on the weight.
        """
        raise self._dependent()

    def difference(self, weight: Tensor) -> Tensor:  # fp32 [o, i] -> [o, i]
        """Return what it adds to a weight."""
        return self.delta()

    def plain(self) -> LoraUpdate:
        """Return the equivalent LoRA, of rank ``rank``.

        Raises:
            UserError: it depends on the weight.
        """
        raise self._dependent()

    def _dependent(self) -> UserError:
        return UserError(
            f"{self.kind} depends on the weights that it changes, so it is not a LoRA by itself. Merge it into its "
            "base with simpletune merge, then use simpletune extract"
        )

    @abstractmethod
    def swapped(self) -> Update:
        """Return the update with the halves of its outputs swapped (scale and shift)."""

    def saved(self) -> tuple[dict[str, Tensor], float]:
        """Return the factors for a file, by role, and alpha. Only of updates that do not depend on the weight."""
        raise NotImplementedError

    def layer(self, base: nn.Module, adapter: str) -> UpdateLayer:
        """Wrap a frozen layer with this update. PEFT wraps those of LoRA.

        Args:
            base: the layer, or a layer that wraps it already.
            adapter: the name by which the wrapping layer's ``scaling`` holds the strength.
        """
        raise NotImplementedError


Updates = Mapping[str, Update]
"""Updates of any kind by diffusers' layer name."""


@dataclass(frozen=True)
class LoraUpdate(Update):
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
    def shape(self) -> tuple[int, int]:
        """As for ``Update``."""
        return self.up.shape[0], self.down.shape[1]

    def delta(self) -> Tensor:  # fp32 [o, i]
        """As for ``Update``."""
        return self.scale * (self.up.float() @ self.down.float())

    def plain(self) -> LoraUpdate:
        """Return itself."""
        return self

    def swapped(self) -> LoraUpdate:
        """As for ``Update``."""
        return replace(self, up=exchanged_halves(self.up))

    def saved(self) -> tuple[dict[str, Tensor], float]:
        """As for ``Update``."""
        factors = {DOWN: self.down, UP: self.up}
        if self.pointwise:
            factors = {role: factor[:, :, None, None] for role, factor in factors.items()}
        return factors, self.scale * self.rank

    def folded(self) -> LoraUpdate:
        """Return the update with scale 1: the scale is folded into ``up``, in its type."""
        if self.scale == 1.0:
            return self
        return replace(self, up=(self.up.float() * self.scale).to(self.up.dtype), scale=1.0)


LoraUpdates = Mapping[str, LoraUpdate]


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
