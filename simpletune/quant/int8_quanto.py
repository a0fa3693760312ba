"""int8 weights by optimum-quanto (qint8): the study's precision, kept as a selectable back end.

Its linear keeps input and weight for the backward pass, so it needs more memory than ``int8`` without checkpointing.
Order matters: quantise, freeze, then add the adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.quant.precision import QuantisedPrecision

if TYPE_CHECKING:
    from torch import nn


class Int8Quanto(QuantisedPrecision):
    """int8 weights in the blocks by optimum-quanto; the base is frozen."""

    weights: Literal["int8-quanto"] = "int8-quanto"
    """int8 weights by optimum-quanto, 1 byte each, for a frozen base."""

    bytes_per_weight: ClassVar[float] = 1

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """quanto's twin of a linear layer, frozen: only the int8 weight and its scales are left."""
        from optimum.quanto import QLinear, qint8

        twin = QLinear.from_module(linear.to(self.compute_dtype()), weights=qint8)
        twin.freeze()
        return twin.requires_grad_(False)
