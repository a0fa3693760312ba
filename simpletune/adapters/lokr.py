"""LoKr: updates by Kronecker products of small matrices (arXiv:2309.14859)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.adapter import Shapes
from simpletune.adapters.layer_method import LayerMethod
from simpletune.adapters.lokr_shapes import factor_shapes
from simpletune.adapters.targets import Targets

if TYPE_CHECKING:
    from torch import Tensor, nn

    from simpletune.adapters.layers import UpdateLayer


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
        from simpletune.adapters.lokr_layer import initialised

        return initialised(self.factor_shapes(outputs, inputs))

    def layer(self, base: nn.Module, factors: dict[str, Tensor]) -> UpdateLayer:
        """As for ``LayerMethod``."""
        from simpletune.adapters.lokr_layer import LokrLayer

        return LokrLayer(base, factors)

    def describe(self, shapes: Shapes) -> str:
        """Describe what is trained."""
        size = "whole factors" if self.rank is None else f"rank {self.rank}"
        return f"LoKr of factor {self.factor}, {size}, on {self.counted(shapes)}"
