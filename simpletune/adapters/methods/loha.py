"""LoHa: updates by elementwise products of two low-rank matrices (arXiv:2108.06098)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.targets import LayerMethod, LayerSettings, StartName, Targets

if TYPE_CHECKING:
    from simpletune.adapters.methods.layers import FactorLayer


class LohaLayers(LayerSettings):
    """What differs in some of the layers of LoHa."""

    rank: Annotated[int, Field(ge=0, le=32)] | None = None
    """Rank in these layers. 0: they get no update. null: as without this entry."""


class Loha(LayerMethod):
    """Train elementwise products of two low-rank matrices as updates of frozen layers."""

    title: ClassVar[str] = "LoHa"
    method: Literal["loha"] = "loha"
    """LoHa: train elementwise products of two low-rank matrices, which ComfyUI loads. LoKr reaches more in a smaller
    file."""
    rank: Annotated[int, Field(ge=1, le=32)] = 4
    """Rank of each of the two matrices. An update has up to its square as rank, and takes the time of a LoRA of that
    rank; its parameters are those of a LoRA of twice this rank."""
    conv_rank: Annotated[int, Field(ge=1, le=32)] | None = None
    """Update a U-Net's convolutions with a kernel larger than 1x1, as for LoRA, with this rank. null: these
    convolutions get no update."""
    targets: Targets = "attention"
    """Layers to update, as for LoRA: attention, attention_qv, attention_image, attention_mlp, all_linear, or a list of
    name endings such as ["attn.to_q", "ff.net.2"]."""
    layers: list[LohaLayers] = []
    """Other ranks and learning rates for some of these layers, by a pattern of their names, as for LoRA."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the factors, their gradients and the file. With bf16 keep optimizer.rounding stochastic, or small
    changes are lost."""
    start: StartName = None
    """LoHa to start from instead of from zero: a file, a run, RUN@STEP or a hub name, of the same rank, with an
    optional strength as in my.safetensors:0.8. Read once, before the first step; takes no memory. null: start from
    zero."""

    def factor_shapes(
        self, outputs: int, inputs: int, layer: str = "", kernel: tuple[int, ...] = ()
    ) -> dict[str, tuple[int, ...]]:
        rank, columns = self.rank_of(layer) or self.rank, inputs * math.prod(kernel)
        one: dict[str, tuple[int, ...]] = {"hada_w1_a": (outputs, rank), "hada_w1_b": (rank, columns)}
        return one | {"hada_w2_a": (outputs, rank), "hada_w2_b": (rank, columns)}

    def layer_class(self) -> type[FactorLayer]:
        from simpletune.adapters.methods.loha_layer import LohaLayer

        return LohaLayer
