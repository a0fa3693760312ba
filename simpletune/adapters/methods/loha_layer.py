"""Layer with a LoHa update: the elementwise product of two low-rank matrices (arXiv:2108.06098).

(A1 B1) o (A2 B2), each of rank r, is a plain low-rank update of rank r^2, whose factors are the Khatri-Rao products of
A1 with A2 and of B1 with B2. Applying these factors avoids building the [o, i] matrix.

Shapes: o outputs, i inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from simpletune.adapters.methods.layers import ADAPTER, UpdateLayer
from simpletune.adapters.methods.lora_product import add_update
from simpletune.engine.tensors import all_tensors


def khatri_rao(one: Tensor, other: Tensor) -> Tensor:  # [r, i], [s, i] -> [r s, i]
    """Multiply every row of one matrix elementwise by every row of the other."""
    return (one[:, None] * other).flatten(0, 1)


def low_rank(factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factors [r^2, i] and [o, r^2] of the equivalent plain low-rank update."""
    down = khatri_rao(factors["hada_w1_b"], factors["hada_w2_b"])
    return down, khatri_rao(factors["hada_w1_a"].t(), factors["hada_w2_a"].t()).t()


def initial_factors(outputs: int, inputs: int, rank: int) -> dict[str, Tensor]:
    """Draw factors from the global generator as LyCORIS does; ``hada_w2_a`` is zero, and so is the update."""
    import torch

    return {
        "hada_w1_a": torch.randn(outputs, rank) * 0.1,
        "hada_w1_b": torch.randn(rank, inputs),
        "hada_w2_a": torch.zeros(outputs, rank),
        "hada_w2_b": torch.randn(rank, inputs),
    }


class LohaLayer(UpdateLayer):
    """Add ((A1 B1) o (A2 B2)) x to a frozen layer's output.

    Args:
        base_layer: the frozen layer.
        factors: ``hada_w1_a`` [o, r], ``hada_w1_b`` [r, i], ``hada_w2_a`` [o, s], ``hada_w2_b`` [s, i].
        adapter: name by which ``scaling`` holds the strength.
    """

    def __init__(self, base_layer: nn.Module, factors: Mapping[str, Tensor], adapter: str = ADAPTER):
        super().__init__(base_layer, adapter)
        device = next(tensor.device for tensor in all_tensors(base_layer))
        for name, factor in factors.items():
            self.register_parameter(name, nn.Parameter(factor.to(device)))

    def updated(self, y: Tensor, x: Tensor) -> Tensor:
        """As for ``UpdateLayer``; builds the factors of rank r^2, but not their product."""
        return add_update(y, x, *low_rank(self.factors), self.strength)

    def merged(self, weight: Tensor) -> Tensor:
        """As for ``UpdateLayer``."""
        a1, b1, a2, b2 = (self.factors[f"hada_w{name}"].float() for name in ("1_a", "1_b", "2_a", "2_b"))
        return weight + self.strength * ((a1 @ b1) * (a2 @ b2)).view_as(weight)

    @property
    def factors(self) -> dict[str, Tensor]:
        """Return the factors by name."""
        return {name: factor for name, factor in self._parameters.items() if factor is not None}
