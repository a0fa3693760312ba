"""int8 weights with one scale per output channel, for a frozen base: the lean linear.

A stock int8 linear keeps its input, or a dequantised copy of its weight, for the backward pass. This one keeps
references to the int8 weight and the scale only: the input needs no gradient of a frozen weight, and the weight is
dequantised again when the input's gradient is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.options import Problem
from simpletune.quant.precision import QuantisedPrecision, is_block_modulation

if TYPE_CHECKING:
    from torch import nn


class Int8(QuantisedPrecision):
    """int8 weights in the blocks, one scale per output channel; the base is frozen."""

    weights: Literal["int8"] = "int8"
    """int8 weights, 1 byte each, for a frozen base."""
    products: Literal["dequantised", "int8"] = "dequantised"
    """How the blocks' linear layers multiply. dequantised: the weight is brought to the type of compute first, for
    every pass; int8: activations are rounded to int8 too, row by row, and int8 x int8 is multiplied by a Triton kernel.
    It is meant to be faster, which no GPU has shown yet; a product's error grows from 0.8 to 1.2%, and more where
    activations have outliers. LoRA's own products stay in the type of compute."""
    input_gradient: Literal["dequantised", "int8"] = "dequantised"
    """How these layers' input gradients are multiplied, in the backward pass. int8: gradients are rounded as
    activations are; needs products int8."""

    bytes_per_weight: ClassVar[float] = 1
    arithmetic: ClassVar[frozenset[str]] = frozenset({"products", "input_gradient"})

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """The int8 twin of a linear layer.

        Modulation layers have a row a sample, whose error every token would share: theirs stays dequantised.
        """
        from simpletune.quant.int8_linear import Int8Linear

        twin = Int8Linear.from_linear(linear, self.compute_dtype())
        twin.int8_products = self.products == "int8" and not is_block_modulation(name)
        twin.int8_gradient = self.input_gradient == "int8"
        return twin

    def rules(self) -> Iterator[Problem]:
        """The gradient alone is not made in int8."""
        if self.input_gradient == "int8" and self.products != "int8":
            yield Problem(
                "precision.input_gradient",
                f"int8 needs precision.products int8, and that is {self.products}. Use products int8, or "
                "input_gradient dequantised",
            )

    def dequantise_count(self, forward: float) -> float:
        """Products in int8 take the weights as they are."""
        return (self.products == "dequantised") * forward + (self.input_gradient == "dequantised")

    def describe_matmul(self) -> str:
        """Which products are used, and where."""
        if self.products != "int8":
            return f"products in {self.compute}, with dequantised weights"
        gradient = "too" if self.input_gradient == "int8" else f"in {self.compute}"
        return (
            f"products in int8 by Triton (dequantised for 16 rows or fewer), input gradients {gradient}, "
            f"all else in {self.compute}"
        )
