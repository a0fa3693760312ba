"""int8 weights by optimum-quanto (qint8), an alternative backend to ``int8``.

Its linear layer saves input and weight for the backward pass, so it needs more memory than ``int8`` without
checkpointing. Order matters: quantise, freeze, then add the adapter. Convolutions stay in the compute type: for
quanto's convolutions, PEFT 0.21 builds the factors as quanto layers without a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.engine.quant.precision import QuantisedPrecision

if TYPE_CHECKING:
    from torch import nn


class Int8Quanto(QuantisedPrecision):
    """int8 weights in the blocks' linear layers by optimum-quanto, for a frozen base."""

    weights: Literal["int8-quanto"] = "int8-quanto"
    """int8 weights by optimum-quanto, 1 byte each, for a frozen base. Convolutions stay in the compute type."""

    bytes_per_weight: ClassVar[float] = 1

    def quantises(self, layer: nn.Module) -> bool:
        """Quantise linear layers only."""
        from torch import nn

        return isinstance(layer, nn.Linear)

    def convert(self, name: str, layer: nn.Module) -> nn.Module:
        """Quantise a linear layer with quanto and freeze it, which leaves only the int8 weight and its scales."""
        from optimum.quanto import QLinear, qint8

        twin = QLinear.from_module(layer.to(self.compute_dtype()), weights=qint8)
        twin.freeze()
        # quanto's CPU kernel crashes or refuses otherwise: a UNet's tokens are a transposed view of its features
        twin.register_forward_pre_hook(lambda module, inputs: tuple(value.contiguous() for value in inputs))
        return twin.requires_grad_(False)
