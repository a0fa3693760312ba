"""LoKr: updates by Kronecker products of small matrices (arXiv:2309.14859).

Shapes: o = l k outputs, i = m q inputs; W1 [l, m], W2 [k, q], or [k, q, kh, kw] of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import Shapes
from simpletune.adapters.methods.targets import LayerMethod, RankedLayers, StartName, Targets, spread
from simpletune.models.lora_registry import is_convolution

if TYPE_CHECKING:
    from simpletune.adapters.methods.layers import FactorLayer


class Lokr(LayerMethod):
    """Train Kronecker products as updates of frozen linear layers and convolutions."""

    title: ClassVar[str] = "LoKr"
    method: Literal["lokr"] = "lokr"
    """LoKr: train Kronecker products of two small matrices; files a fraction of LoRA's size, which ComfyUI loads."""
    factor: Literal[-1] | Annotated[int, Field(ge=2, le=1024)] = 16
    """Bound of the first matrix's sides: each is the largest divisor of the layer's side up to this. A smaller factor
    gives more capacity and a larger file: parameters fall with its square. -1: nearest to the square root, the
    smallest file."""
    rank: Annotated[int, Field(ge=1, le=1024)] | None = 16
    """Rank of the second matrix's own two factors, where they are smaller than the whole; null: train it whole."""
    conv_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Update a U-Net's convolutions with a kernel larger than 1x1, as for LoRA: the rank of their second matrix's two
    factors, where 2 conv_rank is below the matrix's sides, else the matrix is whole, as 1024 makes every one. null:
    these convolutions get no update."""
    decompose_both: bool = False
    """Decompose the first matrix too, where it is larger than twice the rank."""
    targets: Targets = "attention"
    """Layers to update, as for LoRA: attention, attention_qv, attention_image, attention_mlp, all_linear, or a list of
    name endings such as ["attn.to_q", "ff.net.2"]."""
    layers: list[RankedLayers] = []
    """Other ranks and learning rates for some of these layers, by a pattern of their names, as for LoRA."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the factors, their gradients and the file. With bf16 keep optimizer.rounding stochastic, or small
    changes are lost."""
    start: StartName = None
    """LoKr to start from instead of from zero: a file, a run, RUN@STEP or a hub name, of the same factor and rank, with
    an optional strength as in my.safetensors:0.8. Read once, before the first step; takes no memory. null: start from
    zero."""

    def factor_shapes(
        self, outputs: int, inputs: int, layer: str = "", kernel: tuple[int, ...] = ()
    ) -> dict[str, tuple[int, ...]]:
        firsts = []  # l and m: the largest divisor of each side up to the factor (-1: no bound) and its square root
        for side in (outputs, inputs):
            most = math.isqrt(side) if self.factor < 0 else min(self.factor, math.isqrt(side))
            firsts.append(next(divisor for divisor in range(most, 0, -1) if side % divisor == 0))
        left, right = firsts
        found: dict[str, tuple[int, ...]] = {}
        rank = self.rank_of(layer)
        ranks = rank if self.decompose_both else None, rank
        matrices = (left, right), (outputs // left, inputs // right)
        kernels = (), kernel if is_convolution(layer) else ()  # readers take W2's for the convolution's
        for name, (tall, wide), rank, own in zip(("lokr_w1", "lokr_w2"), matrices, ranks, kernels, strict=True):
            if rank is None or 2 * rank >= max(tall, wide):  # whole: two factors would not be smaller
                found[name] = (tall, wide, *own)
            else:
                found |= {f"{name}_a": (tall, rank), f"{name}_b": (rank, wide * math.prod(own))}
        return found

    def layer_class(self) -> type[FactorLayer]:
        from simpletune.adapters.methods.lokr_layer import LokrLayer

        return LokrLayer

    def size_of(self, layers: Sequence[str], shapes: Shapes) -> str:
        ranks = [self.rank_of(layer) for layer in layers]
        sizes = [f"rank {spread(rank for rank in ranks if rank is not None)}"] if any(ranks) else []
        sizes += ["whole factors"] if None in ranks else []
        return f"of factor {self.factor}, {' or '.join(sizes)}"
