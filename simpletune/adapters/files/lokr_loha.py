"""Updates that are not LoRA: LoKr and LoHa, kept as their factors.

Shapes: o outputs, i inputs, r rank; LoKr: W1 [l, m], W2 [k, q].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from simpletune.adapters.files.module_kind import LOHA, LOKR
from simpletune.adapters.files.updates import LoraUpdate, Update
from simpletune.adapters.methods.layers import UpdateLayer
from simpletune.adapters.methods.loha_layer import LohaLayer, low_rank
from simpletune.adapters.methods.lokr_layer import LokrLayer, full_factor
from simpletune.engine.tensors import exchanged_halves

FIRST = {"lokr_w1", "lokr_w1_a", "hada_w1_a"}  # factor that the scale is folded into


@dataclass(frozen=True)
class LokrUpdate(Update):
    """W + scale * rows of kron(W1, W2).

    Args:
        factors: ``lokr_w1`` or ``lokr_w1_a`` and ``lokr_w1_b``; likewise ``lokr_w2``.
        outputs: o.
        scale: the factor on the product.
        skipped: number of the product's first rows that belong to other layers that the file fuses with this one.
        pointwise: whether the layer is a 1x1 convolution.
    """

    factors: Mapping[str, Tensor]
    outputs: int
    scale: float = 1.0
    skipped: int = 0
    pointwise: bool = False
    kind: ClassVar[str] = LOKR

    @property
    def shape(self) -> tuple[int, int]:
        """As for ``Update``."""
        (_, right), (_, beyond) = self._sides
        return self.outputs, right * beyond

    @property
    def rank(self) -> int:
        """As for ``Update``."""
        one, other = (_halves(self.factors, name)[1].shape[0] for name in ("lokr_w1", "lokr_w2"))
        return min(one * other, *self.shape)

    @property
    def dim(self) -> int | None:
        """As for ``Update``; readers ignore alpha if both factors are whole."""
        return next((self.factors[name].shape[0] for name in ("lokr_w2_b", "lokr_w1_b") if name in self.factors), None)

    @property
    def is_own(self) -> bool:
        """Whether the product is only this layer's, so that a file can hold its factors under the layer's name."""
        (left, _), (below, _) = self._sides
        return self.skipped == 0 and left * below == self.outputs

    def delta(self) -> Tensor:  # fp32 [o, i]
        """As for ``Update``."""
        factors = {name: factor.float() for name, factor in self.factors.items()}
        product = torch.kron(full_factor(factors, "lokr_w1"), full_factor(factors, "lokr_w2"))
        return self.scale * product[self.skipped : self.skipped + self.outputs]

    def plain(self) -> LoraUpdate:
        """As for ``Update``."""
        w1, w2 = (_halves(self.factors, name) for name in ("lokr_w1", "lokr_w2"))
        up, down = torch.kron(w1[0], w2[0]), torch.kron(w1[1], w2[1])
        rows = slice(self.skipped, self.skipped + self.outputs)
        if len(down) > min(self.shape):
            return _as_identity(self.delta(), self.pointwise)
        return LoraUpdate(down, up[rows], self.scale, self.pointwise)

    def rows(self, start: int, count: int) -> LokrUpdate:
        """Return the update of ``count`` outputs from ``start``, with only the rows of W1 that they need."""
        height = self._sides[1][0]
        begin = self.skipped + start
        first, last = begin // height, -(-(begin + count) // height)
        name = "lokr_w1" if "lokr_w1" in self.factors else "lokr_w1_a"
        cropped = {**self.factors, name: self.factors[name][first:last]}
        return replace(self, factors=cropped, outputs=count, skipped=begin - first * height)

    def swapped(self) -> LokrUpdate | LoraUpdate:
        """As for ``Update``."""
        name = "lokr_w1" if "lokr_w1" in self.factors else "lokr_w1_a"
        left = self.factors[name]
        if not self.is_own or len(left) % 2:
            return self.plain().swapped()
        return replace(self, factors={**self.factors, name: exchanged_halves(left)})

    def saved(self) -> tuple[dict[str, Tensor], float]:
        """As for ``Update``. Readers ignore alpha if both factors are whole, so the scale goes into W1."""
        if self.dim is None:
            w1 = self.factors["lokr_w1"]
            return {**self.factors, "lokr_w1": (w1.float() * self.scale).to(w1.dtype)}, 1.0
        return dict(self.factors), self.scale * self.dim

    def layer(self, base: nn.Module, adapter: str) -> UpdateLayer:
        """As for ``Update``."""
        return LokrLayer(base, _folded(self.factors, self.scale), adapter, self.skipped)

    @property
    def _sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of W1 and W2."""
        (a, b), (c, d) = (_halves(self.factors, name) for name in ("lokr_w1", "lokr_w2"))
        return (a.shape[0], b.shape[1]), (c.shape[0], d.shape[1])


@dataclass(frozen=True)
class LohaUpdate(Update):
    """W + scale * (A1 B1) o (A2 B2), elementwise.

    Args:
        factors: ``hada_w1_a`` [o, r], ``hada_w1_b`` [r, i], ``hada_w2_a`` [o, r], ``hada_w2_b`` [r, i].
        scale: the factor on the product.
        pointwise: whether the layer is a 1x1 convolution.
    """

    factors: Mapping[str, Tensor]
    scale: float = 1.0
    pointwise: bool = False
    kind: ClassVar[str] = LOHA

    @property
    def shape(self) -> tuple[int, int]:
        """As for ``Update``."""
        return self.factors["hada_w1_a"].shape[0], self.factors["hada_w1_b"].shape[1]

    @property
    def rank(self) -> int:
        """As for ``Update``."""
        one, other = (self.factors[f"hada_w{n}_b"].shape[0] for n in (1, 2))
        return min(one * other, *self.shape)

    @property
    def dim(self) -> int:
        """r."""
        return self.factors["hada_w1_b"].shape[0]

    def delta(self) -> Tensor:  # fp32 [o, i]
        """As for ``Update``."""
        a1, b1, a2, b2 = (self.factors[f"hada_w{name}"].float() for name in ("1_a", "1_b", "2_a", "2_b"))
        return self.scale * ((a1 @ b1) * (a2 @ b2))

    def plain(self) -> LoraUpdate:
        """As for ``Update``."""
        down, up = low_rank({name: factor.float() for name, factor in self.factors.items()})
        if len(down) > min(self.shape):
            return _as_identity(self.delta(), self.pointwise)
        return LoraUpdate(down, up.contiguous(), self.scale, self.pointwise)

    def rows(self, start: int, count: int) -> LohaUpdate:
        """Return the update of ``count`` outputs from ``start``."""
        rows = {name: f[start : start + count] if name.endswith("_a") else f for name, f in self.factors.items()}
        return replace(self, factors=rows)

    def swapped(self) -> LohaUpdate:
        """As for ``Update``."""
        halves = {n: exchanged_halves(f) if n.endswith("_a") else f for n, f in self.factors.items()}
        return replace(self, factors=halves)

    def saved(self) -> tuple[dict[str, Tensor], float]:
        """As for ``Update``."""
        return dict(self.factors), self.scale * self.dim

    def layer(self, base: nn.Module, adapter: str) -> UpdateLayer:
        """As for ``Update``."""
        return LohaLayer(base, _folded(self.factors, self.scale), adapter)


def _halves(factors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return one of LoKr's matrices as two fp32 factors: its own, or the whole and an identity on its shorter side."""
    if name not in factors:
        return factors[f"{name}_a"].float(), factors[f"{name}_b"].float()
    full = factors[name].float()
    tall, wide = full.shape
    return (full, torch.eye(wide)) if wide <= tall else (torch.eye(tall), full)


def _folded(factors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the fp32 factors with the scale folded into the first."""
    return {name: factor.float() * scale if name in FIRST else factor.float() for name, factor in factors.items()}


def _as_identity(delta: Tensor, pointwise: bool) -> LoraUpdate:
    """Return a matrix as a LoRA of full rank."""
    outputs, inputs = delta.shape
    down, up = (delta, torch.eye(outputs)) if outputs <= inputs else (torch.eye(inputs), delta)
    return LoraUpdate(down, up, pointwise=pointwise)
