"""LoKr: updates by Kronecker products of small matrices (arXiv:2309.14859).

Shapes: o = l k outputs, i = m q inputs; W1 [l, m], W2 [k, q].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import Shapes
from simpletune.adapters.methods.layer_method import LayerMethod
from simpletune.adapters.methods.targets import Targets

if TYPE_CHECKING:
    from torch import Tensor, nn

    from simpletune.adapters.methods.layers import UpdateLayer


class Lokr(LayerMethod):
    """Train Kronecker products as updates of frozen linear layers and 1x1 convolutions."""

    title: ClassVar[str] = "LoKr"
    method: Literal["lokr"] = "lokr"
    """LoKr: train Kronecker products of two small matrices; files a fraction of LoRA's size, which ComfyUI loads."""
    factor: Literal[-1] | Annotated[int, Field(ge=2, le=1024)] = 16
    """Bound of the first matrix's sides: each is the largest divisor of the layer's side up to this. A smaller factor
    gives more capacity and a larger file: parameters fall with its square. -1: nearest to the square root, the
    smallest file."""
    rank: Annotated[int, Field(ge=1, le=1024)] | None = 16
    """Rank of the second matrix's own two factors, where they are smaller than the whole; null: train it whole."""
    decompose_both: bool = False
    """Decompose the first matrix too, where it is larger than twice the rank."""
    targets: Targets = "attention"
    """Layers to update, as for LoRA: attention, attention_qv, attention_image, attention_mlp, all_linear, or a list of
    name endings such as ["attn.to_q", "ff.net.2"]."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the factors, their gradients and the file. With bf16 keep optimizer.rounding stochastic, or small
    changes are lost."""

    @property
    def alpha(self) -> float:
        """As for ``LayerMethod``; readers ignore it where both matrices are whole."""
        return self.rank or 1

    def factor_shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, int]]:
        """As for ``LayerMethod``."""
        return factor_shapes((outputs, inputs), self.factor, self.rank, self.decompose_both)

    def initialised(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        """As for ``LayerMethod``."""
        from simpletune.adapters.methods.lokr_layer import initial_factors

        return initial_factors(self.factor_shapes(outputs, inputs))

    def layer(self, base: nn.Module, factors: dict[str, Tensor]) -> UpdateLayer:
        """As for ``LayerMethod``."""
        from simpletune.adapters.methods.lokr_layer import LokrLayer

        return LokrLayer(base, factors)

    def describe(self, shapes: Shapes) -> str:
        """Describe what is trained."""
        size = "whole factors" if self.rank is None else f"rank {self.rank}"
        return f"LoKr of factor {self.factor}, {size}, on {self.counted(shapes)}"


def factor_shapes(sides: tuple[int, int], factor: int, rank: int | None, both: bool) -> dict[str, tuple[int, int]]:
    """Return the shapes of an update's factors by name.

    Args:
        sides: (o, i).
        factor: upper bound of l and m; -1: nearest to the square root.
        rank: rank of a matrix's own two factors; a matrix with no dimension above twice the rank stays whole. None:
            both stay whole.
        both: whether W1 may be decomposed too.
    """
    (left, below), (right, beyond) = ((share, size // share) for size in sides for share in [share_of(size, factor)])
    found = _maybe_decomposed("lokr_w1", (left, right), rank if both else None)
    return found | _maybe_decomposed("lokr_w2", (below, beyond), rank)


def share_of(size: int, factor: int) -> int:
    """Return the largest divisor of a dimension up to ``factor`` and its square root; -1: up to the square root."""
    most = math.isqrt(size) if factor < 0 else min(factor, math.isqrt(size))
    return next(divisor for divisor in range(most, 0, -1) if size % divisor == 0)


def _maybe_decomposed(name: str, shape: tuple[int, int], rank: int | None) -> dict[str, tuple[int, int]]:
    if rank is None or 2 * rank >= max(shape):
        return {name: shape}
    return {f"{name}_a": (shape[0], rank), f"{name}_b": (rank, shape[1])}
