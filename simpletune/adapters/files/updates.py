"""How a file changes one layer: the protocol ``Update``, and its kinds LoRA, LoKr, LoHa, DoRA and OFT.

Shapes: o outputs, i inputs, r rank; LoKr: W1 [l, m], W2 [k, q]; OFT: k blocks of d outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from simpletune.adapters.files.keys import DORA, LOHA, LOKR, LORA, OFT
from simpletune.adapters.methods.formulas import by_norms, full_factor, low_rank, triangle_of, turned_rows
from simpletune.engine.tensors import exchanged_halves
from simpletune.models.shared.lora_names import DOWN, UP, LoraNames
from simpletune.system.options import UserError


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

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the layer's weight may have this shape, (o, i) or (o, i, 1, 1)."""
        outputs, inputs = self.shape
        return (outputs, inputs or shape[1]) == (shape[0], shape[1])

    @abstractmethod
    def difference(self, weight: Tensor) -> Tensor:  # fp32 [o, i] -> [o, i]
        """What it adds to a weight."""

    @abstractmethod
    def swapped(self) -> Update:
        """The update with the halves of its outputs swapped (scale and shift)."""


class AdditiveUpdate(Update):
    """An update that adds the same matrix to any weight, which makes it a LoRA, if perhaps of a high rank."""

    @property
    def pointwise(self) -> bool:
        """Whether the layer is a 1x1 convolution, whose factors files store with two more dimensions of size 1."""
        return False

    @abstractmethod
    def delta(self) -> Tensor:  # fp32 [o, i]
        """The matrix."""

    def difference(self, weight: Tensor) -> Tensor:
        return self.delta()

    @abstractmethod
    def plain(self) -> LoraUpdate:
        """The equivalent LoRA, of rank ``rank``."""

    @abstractmethod
    def saved(self) -> tuple[dict[str, Tensor], float]:
        """The factors for a file, by role, and alpha."""


Updates = Mapping[str, Update]
"""Updates of any kind by diffusers' layer name."""


def require_additive(update: Update) -> AdditiveUpdate:
    """Refuse DoRA and OFT, which have no matrix without the weight.

    Raises:
        UserError: the update depends on the weight.
    """
    if isinstance(update, AdditiveUpdate):
        return update
    raise UserError(
        f"{update.kind} depends on the weights that it changes, so it is not a LoRA by itself. Merge it into its "
        "base with simpletune merge, then use simpletune extract"
    )


@dataclass(frozen=True)
class LoraUpdate(AdditiveUpdate):
    """W + scale * up @ down, with down [r, i], up [o, r] and scale = alpha / r."""

    down: Tensor
    up: Tensor
    scale: float = 1.0
    pointwise: bool = False
    kind: ClassVar[str] = LORA

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]

    def delta(self) -> Tensor:
        return self.scale * (self.up.float() @ self.down.float())

    def plain(self) -> LoraUpdate:
        return self

    def swapped(self) -> LoraUpdate:
        return replace(self, up=exchanged_halves(self.up))

    def saved(self) -> tuple[dict[str, Tensor], float]:
        factors = {DOWN: self.down, UP: self.up}
        if self.pointwise:
            factors = {role: factor[:, :, None, None] for role, factor in factors.items()}
        return factors, self.scale * self.rank

    def folded(self) -> LoraUpdate:
        """The update with scale 1: the scale is folded into ``up``, in its type."""
        if self.scale == 1.0:
            return self
        return replace(self, up=(self.up.float() * self.scale).to(self.up.dtype), scale=1.0)

    @staticmethod
    def of_full_rank(delta: Tensor, pointwise: bool) -> LoraUpdate:
        """A matrix as a LoRA with an identity on its shorter side."""
        outputs, inputs = delta.shape
        down, up = (delta, torch.eye(outputs)) if outputs <= inputs else (torch.eye(inputs), delta)
        return LoraUpdate(down, up, pointwise=pointwise)


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
    shared = all(part.down.shape == first.down.shape and torch.equal(part.down, first.down) for part in present)
    if len(present) == len(parts) and shared:
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
    if update.rank % count == 0:
        width = update.rank // count
        columns = [slice(n * width, (n + 1) * width) for n in range(count)]
        if not any(
            up[:, : own.start].any() or up[:, own.stop :].any() for up, own in zip(ups, columns, strict=True)
        ):  # each part is zero outside its own block of columns
            return [
                LoraUpdate(update.down[own], up[:, own].contiguous(), update.scale)
                for up, own in zip(ups, columns, strict=True)
            ]
    used = torch.stack([(up != 0).any(dim=0) for up in ups])  # [count, r]
    if (used.sum(dim=0) > 1).any() or not used.any():
        return [LoraUpdate(update.down, up.contiguous(), update.scale) for up in ups]
    return [
        LoraUpdate(update.down[own], up[:, own].contiguous(), update.scale) if own.any() else None
        for up, own in zip(ups, used, strict=True)
    ]


@dataclass(frozen=True)
class LokrUpdate(AdditiveUpdate):
    """W + scale * rows of kron(W1, W2).

    Args:
        factors: ``lokr_w1`` or ``lokr_w1_a`` and ``lokr_w1_b``; likewise ``lokr_w2``.
        outputs: o.
        skipped: number of the product's first rows that belong to other layers that the file fuses with this one.
    """

    factors: Mapping[str, Tensor]
    outputs: int
    scale: float = 1.0
    skipped: int = 0
    pointwise: bool = False
    kind: ClassVar[str] = LOKR

    def _halves(self, name: str) -> tuple[Tensor, Tensor]:
        """W1 or W2 as two fp32 factors: its own, or the whole and an identity on its shorter side."""
        if name not in self.factors:
            return self.factors[f"{name}_a"].float(), self.factors[f"{name}_b"].float()
        full = self.factors[name].float()
        tall, wide = full.shape
        return (full, torch.eye(wide)) if wide <= tall else (torch.eye(tall), full)

    @property
    def _sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of W1 and W2."""
        (a, b), (c, d) = self._halves("lokr_w1"), self._halves("lokr_w2")
        return (a.shape[0], b.shape[1]), (c.shape[0], d.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        (_, right), (_, beyond) = self._sides
        return self.outputs, right * beyond

    @property
    def rank(self) -> int:
        (_, one), (_, other) = self._halves("lokr_w1"), self._halves("lokr_w2")
        return min(len(one) * len(other), *self.shape)

    @property
    def dim(self) -> int | None:
        # readers ignore alpha if both factors are whole
        return next((self.factors[name].shape[0] for name in ("lokr_w2_b", "lokr_w1_b") if name in self.factors), None)

    @property
    def is_own(self) -> bool:
        """Whether the product is only this layer's, so that a file can hold its factors under the layer's name."""
        (left, _), (below, _) = self._sides
        return self.skipped == 0 and left * below == self.outputs

    def delta(self) -> Tensor:
        factors = {name: factor.float() for name, factor in self.factors.items()}
        product = torch.kron(full_factor(factors, "lokr_w1"), full_factor(factors, "lokr_w2"))
        return self.scale * product[self.skipped : self.skipped + self.outputs]

    def plain(self) -> LoraUpdate:
        w1, w2 = self._halves("lokr_w1"), self._halves("lokr_w2")
        up, down = torch.kron(w1[0], w2[0]), torch.kron(w1[1], w2[1])
        if len(down) > min(self.shape):
            return LoraUpdate.of_full_rank(self.delta(), self.pointwise)
        return LoraUpdate(down, up[self.skipped : self.skipped + self.outputs], self.scale, self.pointwise)

    def rows(self, start: int, count: int) -> LokrUpdate:
        """The update of ``count`` outputs from ``start``, with only the rows of W1 that they need."""
        height = self._sides[1][0]
        begin = self.skipped + start
        first, last = begin // height, -(-(begin + count) // height)
        name = "lokr_w1" if "lokr_w1" in self.factors else "lokr_w1_a"
        cropped = {**self.factors, name: self.factors[name][first:last]}
        return replace(self, factors=cropped, outputs=count, skipped=begin - first * height)

    def swapped(self) -> LokrUpdate | LoraUpdate:
        name = "lokr_w1" if "lokr_w1" in self.factors else "lokr_w1_a"
        left = self.factors[name]
        if not self.is_own or len(left) % 2:
            return self.plain().swapped()
        return replace(self, factors={**self.factors, name: exchanged_halves(left)})

    def saved(self) -> tuple[dict[str, Tensor], float]:
        if self.dim is None:  # readers ignore alpha, so the scale goes into W1
            w1 = self.factors["lokr_w1"]
            return {**self.factors, "lokr_w1": (w1.float() * self.scale).to(w1.dtype)}, 1.0
        return dict(self.factors), self.scale * self.dim


@dataclass(frozen=True)
class LohaUpdate(AdditiveUpdate):
    """W + scale * (A1 B1) o (A2 B2), elementwise.

    Args:
        factors: ``hada_w1_a`` [o, r], ``hada_w1_b`` [r, i], ``hada_w2_a`` [o, r], ``hada_w2_b`` [r, i].
    """

    factors: Mapping[str, Tensor]
    scale: float = 1.0
    pointwise: bool = False
    kind: ClassVar[str] = LOHA

    @property
    def shape(self) -> tuple[int, int]:
        return self.factors["hada_w1_a"].shape[0], self.factors["hada_w1_b"].shape[1]

    @property
    def rank(self) -> int:
        one, other = (self.factors[f"hada_w{n}_b"].shape[0] for n in (1, 2))
        return min(one * other, *self.shape)

    @property
    def dim(self) -> int:
        return self.factors["hada_w1_b"].shape[0]

    def delta(self) -> Tensor:
        a1, b1, a2, b2 = (self.factors[f"hada_w{name}"].float() for name in ("1_a", "1_b", "2_a", "2_b"))
        return self.scale * ((a1 @ b1) * (a2 @ b2))

    def plain(self) -> LoraUpdate:
        down, up = low_rank({name: factor.float() for name, factor in self.factors.items()})
        if len(down) > min(self.shape):
            return LoraUpdate.of_full_rank(self.delta(), self.pointwise)
        return LoraUpdate(down, up.contiguous(), self.scale, self.pointwise)

    def rows(self, start: int, count: int) -> LohaUpdate:
        """The update of ``count`` outputs from ``start``."""
        rows = {name: f[start : start + count] if name.endswith("_a") else f for name, f in self.factors.items()}
        return replace(self, factors=rows)

    def swapped(self) -> LohaUpdate:
        halves = {n: exchanged_halves(f) if n.endswith("_a") else f for n, f in self.factors.items()}
        return replace(self, factors=halves)

    def saved(self) -> tuple[dict[str, Tensor], float]:
        return dict(self.factors), self.scale * self.dim


@dataclass(frozen=True)
class DoraUpdate(Update):
    """DoRA's weight, m (W + s B A) / ||W + s B A||, by rows.

    Args:
        update: s B A.
        magnitude: m [o], or None if the file contains only ``relative``.
        relative: m ||W|| / ||W + s B A|| [o], which is applied without the norm of the sum: ``dora_scale`` as made for
            ComfyUI.
    """

    update: LoraUpdate
    magnitude: Tensor | None = None
    relative: Tensor | None = None
    kind: ClassVar[str] = DORA

    @property
    def shape(self) -> tuple[int, int]:
        return self.update.shape

    @property
    def rank(self) -> int:
        return self.update.rank

    @property
    def scale(self) -> float:
        return self.update.scale

    def difference(self, weight: Tensor) -> Tensor:
        turned = weight + self.update.delta()
        if self.magnitude is not None:
            gain = by_norms(self.magnitude, turned.norm(dim=1))
        else:
            assert self.relative is not None
            gain = by_norms(self.relative, weight.norm(dim=1))
        return gain[:, None] * turned - weight

    def parts(self, count: int) -> list[DoraUpdate]:
        """The updates of the layers that a fused one stacks."""
        if count == 1:
            return [self]
        parts: Sequence[LoraUpdate | None] = split(self.update, count)
        whole = [replace(self.update, up=up.contiguous()) for up in self.update.up.chunk(count)]
        vectors = [[None] * count if v is None else v.chunk(count) for v in (self.magnitude, self.relative)]
        return [
            DoraUpdate(part or other, *two) for part, other, *two in zip(parts, whole, *vectors, strict=True)
        ]  # fmt: skip

    def swapped(self) -> DoraUpdate:
        vectors = (None if v is None else exchanged_halves(v) for v in (self.magnitude, self.relative))
        return DoraUpdate(self.update.swapped(), *vectors)


@dataclass(frozen=True)
class OftUpdate(Update):
    """OFT's weight R W, with a block-diagonal orthogonal R on the outputs.

    Args:
        blocks: [k, d, d]; only B - B^T matters.
        original: the layer's name and its family's names if the blocks are in the order of the original layout, which
            may swap halves; the blocks alone do not tell.
    """

    blocks: Tensor
    original: tuple[str, LoraNames] | None = None
    kind: ClassVar[str] = OFT

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0] * self.blocks.shape[1], 0

    @property
    def rank(self) -> int:
        return self.shape[0]

    @property
    def dim(self) -> None:
        return None

    def difference(self, weight: Tensor) -> Tensor:
        return turned_rows(weight, self.triangle(weight.shape[1]))

    def swapped(self) -> OftUpdate:
        return self  # records its order itself

    def triangle(self, inputs: int) -> Tensor:  # [k, d (d - 1) / 2]
        """The entries above the diagonal of the skew-symmetric blocks, in diffusers' order."""
        blocks = self.blocks.float()
        if self.original is not None and self.original[1].halves_swapped(self.original[0], self.shape[0], inputs):
            blocks = exchanged_halves(blocks)
        return triangle_of(blocks)
