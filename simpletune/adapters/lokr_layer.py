"""A layer with a LoKr update: the Kronecker product of two small matrices (arXiv:2309.14859).

Shapes: o = l k outputs, i = m q inputs; W1 [l, m], W2 [k, q]; either may be a product of two factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from simpletune.adapters.kronecker import add_kronecker, sides
from simpletune.adapters.layers import ADAPTER, UpdateLayer
from simpletune.tensors import all_tensors


def initialised(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Draw factors from the global generator: the update is zero, and the second factor gets a gradient at once."""
    found = {}
    for name, shape in shapes.items():
        factor = torch.zeros(shape)
        if name not in ("lokr_w2", "lokr_w2_b"):
            nn.init.kaiming_uniform_(factor, a=math.sqrt(5))
        found[name] = factor
    return found


def whole(factors: Mapping[str, Tensor], name: str) -> Tensor:
    """A factor, or the product of its two factors."""
    return factors[name] if name in factors else factors[f"{name}_a"] @ factors[f"{name}_b"]


class LokrLayer(UpdateLayer):
    """Adds scale kron(W1, W2) x, or rows of it, to a frozen layer's output.

    Args:
        base_layer: the frozen layer.
        factors: ``lokr_w1`` [l, m] or ``lokr_w1_a`` [l, r] and ``lokr_w1_b`` [r, m]; likewise ``lokr_w2`` [k, q].
        adapter: name by which ``scaling`` holds the strength.
        skipped: how many of the product's first rows belong to other layers.
    """

    def __init__(self, base_layer: nn.Module, factors: Mapping[str, Tensor], adapter: str = ADAPTER, skipped: int = 0):
        super().__init__(base_layer, adapter)
        device = next(tensor.device for tensor in all_tensors(base_layer))
        for name, factor in factors.items():
            self.register_parameter(name, nn.Parameter(factor.to(device)))
        self.skipped = skipped

    def updated(self, y: Tensor, x: Tensor) -> Tensor:
        """As for ``UpdateLayer``; never builds the product."""
        factors = self.factors
        w1 = whole(factors, "lokr_w1")
        w1 = w1 if self.strength == 1 else w1 * self.strength
        if "lokr_w2" in factors:
            before, after = sides(w1, factors["lokr_w2"])
            height = len(w1) * len(factors["lokr_w2"])
        else:
            before, after = factors["lokr_w2_b"], factors["lokr_w2_a"]
            height = len(w1) * len(after)
        if height == y.shape[-1]:
            return add_kronecker(y, x, w1, before, after)
        rows = add_kronecker(y.new_zeros(*y.shape[:-1], height), x, w1, before, after)
        return y + rows[..., self.skipped : self.skipped + y.shape[-1]]

    def merged(self, weight: Tensor) -> Tensor:
        """As for ``UpdateLayer``."""
        factors = {name: factor.float() for name, factor in self.factors.items()}
        delta = torch.kron(whole(factors, "lokr_w1"), whole(factors, "lokr_w2"))
        return weight + self.strength * delta[self.skipped : self.skipped + len(weight)].view_as(weight)

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors by name."""
        return {name: factor for name, factor in self._parameters.items() if factor is not None}
