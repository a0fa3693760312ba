"""OFT's layer: W' = R W, with a block-diagonal orthogonal R on the outputs (arXiv:2306.07280, Cayley parameterisation).

The paper rotates the inputs of a layer. ComfyUI expects rotated outputs, which need only the frozen layer's output and
so work with every precision. Like the paper's, they keep all singular values of W.

Shapes: n rows, o outputs in k blocks of d.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from simpletune.adapters.methods.formulas import rotate, rotate_rows
from simpletune.adapters.methods.layers import ADAPTER, FactorLayer, innermost_layer


class OftLayer(FactorLayer):
    """A frozen linear layer or convolution whose outputs are rotated block by block; at strength k, W + k (R - I)
    W. Its factor ``oft_triangle`` [k, d (d - 1) / 2] has the entries above the diagonal of each block's Q."""

    oft_triangle: nn.Parameter

    @staticmethod
    def initial_factors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}

    def __init__(self, base_layer: nn.Module, factors: Mapping[str, Tensor], adapter: str = ADAPTER):
        super().__init__(base_layer, factors, adapter)
        assert self.shape is not None
        self.side = self.shape[0] // len(self.oft_triangle)

    def add_linear(self, y: Tensor, x: Tensor) -> Tensor:
        bias = innermost_layer(self).bias  # is not rotated
        own = y if bias is None else y - bias.to(y.dtype)  # type: ignore[operator]
        return torch.add(y, rotate(own, self.oft_triangle), alpha=self.strength)

    def add_convolution(self, y: Tensor, x: Tensor) -> Tensor:  # rotates outputs, so the kernel does not matter
        return self.add_linear(y.movedim(1, -1), x).movedim(-1, 1)

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        return weight + self.strength * rotate_rows(weight.flatten(1), self.oft_triangle).view_as(weight)
