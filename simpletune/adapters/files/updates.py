"""How a file changes one layer: the protocol ``Update``, and its kinds LoRA, LoKr, LoHa, DoRA of each, and OFT.

Every weight is a matrix here: a convolution's, [o, c, kh, kw], has i = c kh kw inputs.

Shapes: o outputs, i inputs, r rank; LoKr: W1 [l, m], W2 [k, q]; OFT: k blocks of d outputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from simpletune.adapters.files.keys import DECOMPOSED, LOHA, LOKR, LORA, OFT
from simpletune.adapters.methods.formulas import (
    by_norms,
    hadamard_delta,
    kronecker_delta,
    low_rank,
    rotate_rows,
    triangle_of,
)
from simpletune.engine.tensors import swap_halves
from simpletune.models.lora_registry import INPUTS
from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_layout import DOWN, UP, LoraNames
from simpletune.models.shared.model_config import Shapes
from simpletune.system.console import say
from simpletune.system.options import UserError, plural


class Update(ABC):
    """How a file changes one linear layer or convolution: the protocol of LoRA, LoKr, LoHa, DoRA and OFT.

    The kinds are dataclasses of the file's tensors; nothing changes them. DoRA and OFT depend on the weight, so no
    matrix and no LoRA equals them.
    """

    kind: ClassVar[str]
    """LoRA, LoKr, LoHa, DoRA or OFT."""
    shape: tuple[int, int]
    """(o, i), the shape of the layer's weight as a matrix; i is 0 if the file does not tell it."""
    rank: int
    """Largest rank that the update can have: the rank of an equivalent LoRA."""
    dim: int | None
    """Number that readers divide alpha by; None: they ignore alpha."""
    scale: float = 1.0
    """The factor on the product of the factors."""
    kernel: tuple[int, ...] = ()
    """(kh, kw) of a convolution, whose factors files store with two more dimensions; () of a linear layer."""

    @property
    def is_spatial(self) -> bool:
        """Whether the layer is a convolution larger than 1x1."""
        return math.prod(self.kernel) > 1

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the layer's weight may have this shape, (o, i) or (o, c, kh, kw)."""
        outputs, inputs = self.shape
        own = math.prod(shape[1:])
        return (outputs, inputs or own) == (shape[0], own)

    def delta_for(self, weight: Tensor) -> Tensor:  # fp32 [o, i] -> [o, i]
        """Return what the update adds to a weight."""
        return self.delta()

    def delta(self) -> Tensor:  # fp32 [o, i]
        """Return the matrix that the update adds to any weight. Raises UserError if it depends on the weight."""
        raise UserError(
            f"{self.kind} depends on the weights that it changes, so it is not a LoRA by itself. Merge it into its "
            "base with simpletune lora merge, then use simpletune lora extract"
        )

    def as_lora(self) -> LoraUpdate:
        """Return the equivalent LoRA, of rank ``rank``. Raises UserError if the update depends on the weight."""
        delta = self.delta()
        outputs, inputs = delta.shape  # an identity on the shorter side
        down, up = (delta, torch.eye(outputs)) if outputs <= inputs else (torch.eye(inputs), delta)
        return LoraUpdate(down, up, kernel=self.kernel)

    def file_factors(self) -> tuple[dict[str, Tensor], float]:
        """Return a file's factors, by role, and alpha; not of DoRA and OFT, whose tensors depend on the layout."""
        raise NotImplementedError

    @abstractmethod
    def split(self, rows: Sequence[Rows]) -> Sequence[Update | None]:
        """Split a fused layer's update into those of the layers of these rows; None: it does not change a layer."""

    @abstractmethod
    def swap_halves(self) -> Update:
        """Swap the halves of the update's outputs (scale and shift)."""


Updates = Mapping[str, Update]
"""Updates of any kind by diffusers' layer name."""


@dataclass(eq=False)
class LoraUpdate(Update):
    """W + scale * up @ down, with down [r, i], up [o, r] and scale = alpha / r."""

    down: Tensor
    up: Tensor
    scale: float = 1.0
    kernel: tuple[int, ...] = ()
    kind: ClassVar[str] = LORA

    def __post_init__(self) -> None:
        self.shape = self.up.shape[0], self.down.shape[1]
        self.rank = self.dim = self.down.shape[0]

    def delta(self) -> Tensor:
        return self.scale * (self.up.float() @ self.down.float())

    def as_lora(self) -> LoraUpdate:
        return self

    def file_factors(self) -> tuple[dict[str, Tensor], float]:
        factors = {DOWN: self.down, UP: self.up}
        if self.kernel:
            factors = {DOWN: self.down.reshape(self.rank, -1, *self.kernel), UP: self.up[:, :, None, None]}
        return factors, self.scale * self.rank

    def split(self, rows: Sequence[Rows]) -> Sequence[LoraUpdate | None]:
        """Invert ``fuse``, up to rows and columns of zeros; the scale, alpha / r, stays.

        If no columns are shared, each part gets only its own, and a part without columns is None. If columns are
        shared, because a tool trained the fused layer itself, each part keeps the whole ``down``.
        """
        ups, count = [self.up[own.within(len(self.up))] for own in rows], len(rows)
        if self.rank % count == 0:
            width = self.rank // count
            columns = [slice(n * width, (n + 1) * width) for n in range(count)]
            if not any(
                up[:, : own.start].any() or up[:, own.stop :].any() for up, own in zip(ups, columns, strict=True)
            ):  # each part is zero outside its own block of columns
                return [
                    LoraUpdate(self.down[own], up[:, own].contiguous(), self.scale)
                    for up, own in zip(ups, columns, strict=True)
                ]
        used = torch.stack([(up != 0).any(dim=0) for up in ups])  # [count, r]
        if (used.sum(dim=0) > 1).any() or not used.any():
            return [LoraUpdate(self.down, up.contiguous(), self.scale) for up in ups]
        return [
            LoraUpdate(self.down[own], up[:, own].contiguous(), self.scale) if own.any() else None
            for up, own in zip(ups, used, strict=True)
        ]

    def swap_halves(self) -> LoraUpdate:
        return replace(self, up=swap_halves(self.up))

    def folded(self) -> LoraUpdate:
        """Return the update with scale 1: the scale is folded into ``up``, in its type."""
        if self.scale == 1.0:
            return self
        return replace(self, up=(self.up.float() * self.scale).to(self.up.dtype), scale=1.0)


LoraUpdates = Mapping[str, LoraUpdate]


def fuse(parts: Mapping[Rows, LoraUpdate]) -> LoraUpdate:
    """Fuse the updates of layers that another layout stacks in one, by the rows that each is, such as those of q, k, v.

    If all share ``down``, the result keeps it and has rank r. Otherwise it stacks the downs, puts the ups on the
    diagonal, and has the sum of their ranks; alpha, which is scale x rank, grows with it. A part that is missing gets
    rows of zeros. Raises UserError if the heights of the parts, or their inputs, do not belong to one layer.
    """
    present = dict(sorted(parts.items()))
    if len({part.scale for part in present.values()}) > 1:
        present = {rows: part.folded() for rows, part in present.items()}
    first = next(iter(present.values()))
    heights = {rows.whole(part.shape[0]) for rows, part in present.items()}
    if len(heights) > 1 or len({part.shape[1] for part in present.values()}) > 1:
        listed = ", ".join(f"{part.shape[0]} x {part.shape[1]}" for part in present.values())
        raise UserError(f"layers that are one in the original layout have updates of sizes {listed}. Export them again")
    downs = [part.down for part in present.values()]
    shared = all(down.shape == first.down.shape and torch.equal(down, first.down) for down in downs)
    if shared and sum(rows.last - rows.first for rows in present) == next(iter(present)).of:
        return LoraUpdate(first.down, torch.cat([part.up for part in present.values()]), first.scale)
    up, column = first.up.new_zeros(heights.pop(), sum(part.rank for part in present.values())), 0
    for rows, part in present.items():
        up[rows.within(len(up)), column : column + part.rank] = part.up
        column += part.rank
    return LoraUpdate(torch.cat(downs), up, first.scale)


@dataclass(eq=False)
class LokrUpdate(Update):
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
    kernel: tuple[int, ...] = ()
    kind: ClassVar[str] = LOKR

    def __post_init__(self) -> None:
        sides, rank, self.dim = [], 1, None  # readers ignore alpha if both matrices are whole
        for name in ("lokr_w1", "lokr_w2"):
            if name in self.factors:
                sides.append(tuple(self.factors[name].shape))
                rank *= min(sides[-1])
            else:
                self.dim, wide = self.factors[f"{name}_b"].shape
                sides.append((len(self.factors[f"{name}_a"]), wide))
                rank *= self.dim
        (left, right), (self.height, beyond) = sides  # W1 [l, m] and W2 [k, q]
        self.shape = self.outputs, right * beyond
        self.rank = min(rank, *self.shape)
        # whether the product is only this layer's, so that a file can hold its factors under the layer's name
        self.is_own = self.skipped == 0 and left * self.height == self.outputs
        self.upper = "lokr_w1" if "lokr_w1" in self.factors else "lokr_w1_a"  # the factor with W1's rows

    def delta(self) -> Tensor:
        return self.scale * kronecker_delta(self.factors)[self.skipped : self.skipped + self.outputs]

    def as_lora(self) -> LoraUpdate:
        pairs = []  # W1 and W2 as two factors each: their own, or the whole and an identity on its shorter side
        for name in ("lokr_w1", "lokr_w2"):
            if name not in self.factors:
                pairs.append((self.factors[f"{name}_a"].float(), self.factors[f"{name}_b"].float()))
                continue
            whole = self.factors[name].float()
            tall, wide = whole.shape
            pairs.append((whole, torch.eye(wide)) if wide <= tall else (torch.eye(tall), whole))
        if math.prod(len(down) for _, down in pairs) > min(self.shape):
            return super().as_lora()
        up, down = (torch.kron(one, other) for one, other in zip(*pairs, strict=True))
        return LoraUpdate(down, up[self.skipped : self.skipped + self.outputs], self.scale, self.kernel)

    def file_factors(self) -> tuple[dict[str, Tensor], float]:
        factors = self._unfolded(bool(self.kernel))  # LyCORIS loads no matrix into a convolution, one of 1x1 included
        if self.dim is None:  # readers ignore alpha, so the scale goes into W1
            w1 = factors["lokr_w1"]
            return {**factors, "lokr_w1": (w1.float() * self.scale).to(w1.dtype)}, 1.0
        return factors, self.scale * self.dim

    def shaped(self) -> dict[str, Tensor]:
        """Return the factors with the shapes that they have in training."""
        return self._unfolded(self.is_spatial)

    def _unfolded(self, has_kernel: bool) -> dict[str, Tensor]:
        factors = dict(self.factors)
        if "lokr_w2" in factors and has_kernel:
            factors["lokr_w2"] = factors["lokr_w2"].reshape(self.height, -1, *self.kernel)
        return factors

    def split(self, rows: Sequence[Rows]) -> Sequence[LokrUpdate]:
        """Split the update into parts, each with only the rows of W1 that it needs."""
        parts = []
        for own in (each.within(self.outputs) for each in rows):
            begin, outputs = self.skipped + own.start, own.stop - own.start
            first, last = begin // self.height, -(-(begin + outputs) // self.height)
            factors = {**self.factors, self.upper: self.factors[self.upper][first:last]}
            parts.append(replace(self, factors=factors, outputs=outputs, skipped=begin - first * self.height))
        return parts

    def swap_halves(self) -> LokrUpdate | LoraUpdate:
        rows = self.factors[self.upper]
        if not self.is_own or len(rows) % 2:
            return self.as_lora().swap_halves()
        return replace(self, factors={**self.factors, self.upper: swap_halves(rows)})


@dataclass(eq=False)
class LohaUpdate(Update):
    """W + scale * (A1 B1) o (A2 B2), elementwise.

    Args:
        factors: ``hada_w1_a`` [o, r], ``hada_w1_b`` [r, i], ``hada_w2_a`` [o, r], ``hada_w2_b`` [r, i].
    """

    factors: Mapping[str, Tensor]
    scale: float = 1.0
    kernel: tuple[int, ...] = ()
    kind: ClassVar[str] = LOHA

    def __post_init__(self) -> None:
        self.dim, inputs = self.factors["hada_w1_b"].shape
        self.shape = len(self.factors["hada_w1_a"]), inputs
        self.rank = min(self.dim * len(self.factors["hada_w2_b"]), *self.shape)

    def delta(self) -> Tensor:
        return self.scale * hadamard_delta(self.factors)

    def as_lora(self) -> LoraUpdate:
        assert self.dim is not None
        if self.dim * len(self.factors["hada_w2_b"]) > min(self.shape):
            return super().as_lora()
        down, up = low_rank({name: factor.float() for name, factor in self.factors.items()})
        return LoraUpdate(down, up.contiguous(), self.scale, self.kernel)

    def file_factors(self) -> tuple[dict[str, Tensor], float]:
        assert self.dim is not None
        return dict(self.factors), self.scale * self.dim

    def split(self, rows: Sequence[Rows]) -> Sequence[LohaUpdate]:
        spans = [own.within(self.shape[0]) for own in rows]
        split = [{n: f[own] if n.endswith("_a") else f for n, f in self.factors.items()} for own in spans]
        return [replace(self, factors=factors) for factors in split]

    def swap_halves(self) -> LohaUpdate:
        halves = {n: swap_halves(f) if n.endswith("_a") else f for n, f in self.factors.items()}
        return replace(self, factors=halves)


@dataclass(eq=False)
class DoraUpdate(Update):
    """DoRA's weight, m (W + s B A) / ||W + s B A||, by rows or by the columns of each input channel; of LoKr and LoHa
    with their matrix for s B A.

    Args:
        update: s B A.
        magnitude: m [o], or None if the file contains only ``relative``; [c] for each input channel.
        relative: m ||W|| / ||W + s B A|| [o], which is applied without the norm of the sum: ``dora_scale`` as made for
            ComfyUI.
        by_input: whether magnitudes and norms are of input channels, as OneTrainer and older LyCORIS have them.
    """

    update: Update
    magnitude: Tensor | None = None
    relative: Tensor | None = None
    by_input: bool = False

    def __post_init__(self) -> None:
        self.shape, self.scale, self.kernel = self.update.shape, self.update.scale, self.update.kernel
        self.rank, self.dim = self.update.rank, self.update.dim

    @property
    def kind(self) -> str:  # type: ignore[override]
        return DECOMPOSED[self.update.kind]

    @property
    def is_plain(self) -> bool:
        """Whether it is DoRA as this package trains it: LoRA with magnitudes of the outputs."""
        return isinstance(self.update, LoraUpdate) and not self.by_input

    def gains(self, blocks: Iterable[Tensor]) -> Tensor:  # fp32 [o], or [c] of input channels
        """Compute m / ||W + s B A||, from blocks of W's rows in fp32, on their device."""
        delta, first, found = self.update.delta(), 0, list[Tensor]()
        for block in blocks:
            turned = block + delta[first : first + len(block)].to(block.device)
            first += len(block)
            if self.by_input:
                assert self.magnitude is not None
                found.append(turned.unflatten(1, (len(self.magnitude), -1)).square().sum((0, 2)))
            else:
                found.append((block if self.magnitude is None else turned).norm(dim=1))
        norms = torch.stack(found).sum(0).sqrt() if self.by_input else torch.cat(found)
        magnitude = self.relative if self.magnitude is None else self.magnitude
        assert magnitude is not None
        return by_norms(magnitude.to(norms.device), norms)

    def delta_for(self, weight: Tensor) -> Tensor:
        turned, gain = weight + self.update.delta(), self.gains([weight])
        if self.by_input:
            return (turned.unflatten(1, (len(gain), -1)) * gain[:, None]).flatten(1) - weight
        return gain[:, None] * turned - weight

    def split(self, rows: Sequence[Rows]) -> Sequence[DoraUpdate]:
        spans = [own.within(self.shape[0]) for own in rows]
        whole = self.update
        return [
            DoraUpdate(
                part if part is not None else replace(whole, up=whole.up[own].contiguous()),  # type: ignore[attr-defined, type-var]
                None if self.magnitude is None else self.magnitude[own],
                None if self.relative is None else self.relative[own],
            )
            for part, own in zip(self.update.split(rows), spans, strict=True)
        ]

    def swap_halves(self) -> DoraUpdate:
        if self.by_input:
            return replace(self, update=self.update.swap_halves())
        magnitude, relative = (None if v is None else swap_halves(v) for v in (self.magnitude, self.relative))
        return DoraUpdate(self.update.swap_halves(), magnitude, relative)


@dataclass(eq=False)
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

    def __post_init__(self) -> None:
        self.rank = self.blocks.shape[0] * self.blocks.shape[1]
        self.shape, self.dim = (self.rank, 0), None

    def delta_for(self, weight: Tensor) -> Tensor:
        return rotate_rows(weight, self.triangle(weight.shape[1]))

    def split(self, rows: Sequence[Rows]) -> Sequence[OftUpdate]:
        return [replace(self, blocks=self.blocks[own.within(len(self.blocks))]) for own in rows]

    def swap_halves(self) -> OftUpdate:
        return self  # records its order itself

    def triangle(self, inputs: int) -> Tensor:  # [k, d (d - 1) / 2]
        """Return the entries above the diagonal of the skew-symmetric blocks, in diffusers' order."""
        blocks = self.blocks.float()
        if self.original is not None and self.original[1].halves_swapped(self.original[0], self.shape[0], inputs):
            blocks = swap_halves(blocks)
        return triangle_of(blocks)


def without_other_input(place: str, updates: Updates, shapes: Shapes) -> Updates:
    """Return the updates that suit a plain model if the LoRA at a place was made for one that inpaints, and the
    reverse: all but that of the layer that reads the latents, which has other inputs. Says what it leaves out.

    Args:
        shapes: of the model's weights, by layer.

    Raises:
        UserError: nothing is left.
    """
    for layer in sorted(INPUTS & updates.keys() & shapes.keys()):
        _, own, *kernel = shapes[layer]
        given, odd = divmod(updates[layer].shape[1], math.prod(kernel))
        if odd or max(given, own) != 2 * min(given, own) + 1:
            continue
        differs = f"its {layer} reads {given} channels and this model's {own}: one is for inpainting, the other not"
        if len(updates) == 1:
            raise UserError(f"{place} updates nothing else, and {differs}. Give a LoRA that updates other layers")
        say(f"lora    {place}: {differs}. Left out, and the other {plural(len(updates) - 1, 'layer')} applied")
        updates = {name: update for name, update in updates.items() if name != layer}
    return updates
