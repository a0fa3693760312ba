"""LoKr: updates by Kronecker products of small matrices (arXiv:2309.14859).

Shapes: o = l k outputs, i = m q inputs; W1 [l, m], W2 [k, q].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import Shapes
from simpletune.adapters.methods.targets import LayerMethod, RankedLayers, StartName, Targets

if TYPE_CHECKING:
    from simpletune.adapters.methods.layers import FactorLayer


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
    layers: list[RankedLayers] = []
    """Other ranks and learning rates for some of these layers, by a pattern of their names, as for LoRA."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the factors, their gradients and the file. With bf16 keep optimizer.rounding stochastic, or small
    changes are lost."""
    start: StartName = None
    """LoKr to start from instead of from zero: a file, a run, RUN@STEP or a hub name, of the same factor and rank, with
    an optional strength as in my.safetensors:0.8. Read once, before the first step; takes no memory. null: start from
    zero."""

    def factor_shapes(self, outputs: int, inputs: int, layer: str = "") -> dict[str, tuple[int, int]]:
        firsts = []  # l and m: the largest divisor of each side up to the factor (-1: no bound) and its square root
        for side in (outputs, inputs):
            most = math.isqrt(side) if self.factor < 0 else min(self.factor, math.isqrt(side))
            firsts.append(next(divisor for divisor in range(most, 0, -1) if side % divisor == 0))
        left, right = firsts
        found: dict[str, tuple[int, int]] = {}
        own = self.rank_of(layer)
        ranks = own if self.decompose_both else None, own
        matrices = (left, right), (outputs // left, inputs // right)
        for name, (tall, wide), rank in zip(("lokr_w1", "lokr_w2"), matrices, ranks, strict=True):
            if rank is None or 2 * rank >= max(tall, wide):  # whole: two factors would not be smaller
                found[name] = (tall, wide)
            else:
                found |= {f"{name}_a": (tall, rank), f"{name}_b": (rank, wide)}
        return found

    def layer_class(self) -> type[FactorLayer]:
        from simpletune.adapters.methods.lokr_layer import LokrLayer

        return LokrLayer

    def describe(self, shapes: Shapes) -> str:
        sizes = [f"rank {ranks}"] if (ranks := self.ranks(shapes)) else []
        sizes += ["whole factors"] if None in map(self.rank_of, self.modules(shapes)) else []
        size = " or ".join(sizes)
        return f"LoKr of factor {self.factor}, {size}, on {self.counted(shapes)}"
