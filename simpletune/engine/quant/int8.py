"""int8 weights with one scale per output channel, for a frozen base.

Stock int8 layers save their input, or a dequantised copy of their weight, for the backward pass. These linear layers
and convolutions save only references to the int8 weight and the scale: a frozen weight needs no gradient, and the
gradient of the input dequantises the weight again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.engine.quant.precision import QuantisedPrecision, describe_rotation, is_block_modulation
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from torch import nn


class Int8(QuantisedPrecision):
    """int8 weights in the blocks with one scale per output channel, for a frozen base."""

    weights: Literal["int8"] = "int8"
    """int8 weights, 1 byte each, for a frozen base."""
    products: Literal["dequantised", "int8"] = "dequantised"
    """How the blocks' linear layers multiply. dequantised: every pass converts the weight to the compute type first;
    int8: activations are quantised to int8 row by row, and a Triton kernel multiplies int8 x int8. int8 is meant to be
    faster, which has not been measured on a GPU yet; a product's error grows from 0.8 to 1.2%, and more if activations
    have outliers. LoRA's own products stay in the compute type, and convolutions dequantise."""
    input_gradient: Literal["dequantised", "int8"] = "dequantised"
    """How the backward pass computes these layers' input gradients. int8: gradients are quantised like activations;
    needs products int8."""
    rotation: Literal["none", "hadamard"] = "none"
    """Rotate the linear layers' weights, and their inputs in every pass, by a block Hadamard matrix of 256, 64 or 16
    columns (arXiv:2512.03673), so that outliers do not decide the scales: with a few columns of the activations 30
    times as large, int8 products err by 1.1 to 1.4% in place of 5 to 9%. Costs time. Convolutions are not rotated."""

    bytes_per_weight: ClassVar[float] = 1
    arithmetic: ClassVar[frozenset[str]] = frozenset({"products", "input_gradient"})

    def convert(self, name: str, layer: nn.Module) -> nn.Module:
        """Quantise a linear layer or a convolution to int8.

        Modulation layers always multiply dequantised weights: they have one row per sample, and all of its tokens would
        share the error.
        """
        from torch import nn

        from simpletune.engine.quant.int8_conv import Int8Conv2d
        from simpletune.engine.quant.int8_linear import Int8Linear

        if isinstance(layer, nn.Conv2d):
            return Int8Conv2d.from_conv(layer, self.compute_dtype())
        assert isinstance(layer, nn.Linear)
        twin = Int8Linear.from_linear(layer, self.compute_dtype(), self.rotation)
        twin.rotates_weight = not is_block_modulation(name)
        twin.int8_products = self.products == "int8" and not is_block_modulation(name)
        twin.int8_gradient = self.input_gradient == "int8"
        return twin

    def prepare(self, units: Iterable[nn.Module]) -> None:
        """Let feed-forward networks quantise GELU's output in one launch."""
        from simpletune.engine.quant.int8_gelu import fuse_feed_forwards

        if self.products == "int8":
            fuse_feed_forwards(units)

    def rules(self) -> Iterator[Problem]:
        """Refuse int8 gradients without int8 products."""
        if self.input_gradient == "int8" and self.products != "int8":
            yield Problem(
                "precision.input_gradient",
                f"int8 needs precision.products int8, which is {self.products}. Use products int8, or input_gradient "
                "dequantised",
            )

    def describe_matmul(self) -> str:
        """Describe which products are used, and where."""
        turned = describe_rotation(self.rotation)
        if self.products != "int8":
            return f"products in {self.in_words}, with dequantised weights{turned}"
        gradient = "too" if self.input_gradient == "int8" else f"in {self.in_words}"
        return (
            f"products in int8 by Triton (dequantised for 16 rows or fewer), input gradients {gradient}, "
            f"everything else in {self.in_words}{turned}"
        )
