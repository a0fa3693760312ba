"""Layer with a LoHa update: the elementwise product of two low-rank matrices (arXiv:2108.06098).

(A1 B1) o (A2 B2), each of rank r, is a plain low-rank update of rank r^2, whose factors are the Khatri-Rao products of
A1 with A2 and of B1 with B2. Applying these factors avoids building the [o, i] matrix. On a convolution with a larger
kernel, the second one is a convolution to r^2 channels.

Shapes: o outputs, i inputs, r rank, kh x kw the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from simpletune.adapters.methods.formulas import hadamard_delta, low_rank
from simpletune.adapters.methods.layers import FactorLayer, geometry_of
from simpletune.adapters.methods.lora_layers import add_convolution_update, add_update


class LohaLayer(FactorLayer):
    """Add ((A1 B1) o (A2 B2)) x to a frozen layer's output; the factors are ``hada_w1_a`` [o, r], ``hada_w1_b`` [r, i],
    ``hada_w2_a`` [o, s], ``hada_w2_b`` [s, i]; i is i kh kw with a larger kernel."""

    @staticmethod
    def initial_factors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {  # as LyCORIS draws them; hada_w2_a is zero, and so is the update
            "hada_w1_a": torch.randn(shapes["hada_w1_a"]) * 0.1,
            "hada_w1_b": torch.randn(shapes["hada_w1_b"]),
            "hada_w2_a": torch.zeros(shapes["hada_w2_a"]),
            "hada_w2_b": torch.randn(shapes["hada_w2_b"]),
        }

    def add_linear(self, y: Tensor, x: Tensor) -> Tensor:
        return add_update(y, x, *low_rank(self.factors), self.strength)  # never builds [o, i]

    def add_convolution(self, y: Tensor, x: Tensor) -> Tensor:
        assert self.shape is not None
        down, up = low_rank(self.factors)
        return add_convolution_update(y, x, down.view(-1, *self.shape[1:]), up, self.strength, geometry_of(self))

    def merge(self, weight: Tensor) -> Tensor:
        return weight + self.strength * hadamard_delta(self.factors).view_as(weight)
