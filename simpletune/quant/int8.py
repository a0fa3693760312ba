"""int8 weights with one scale per output channel, for a frozen base: the lean linear.

A stock int8 linear keeps its input, or a dequantised copy of its weight, for the backward pass. This one keeps
references to the int8 weight and the scale only: the input needs no gradient of a frozen weight, and the weight is
dequantised again when the input's gradient is due.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from simpletune.quant.precision import WeightPrecision, in_blocks


class Int8(WeightPrecision):
    """int8 weights in the blocks, one scale per output channel; the base is frozen."""

    weights: Literal["int8"] = "int8"
    """int8 weights, 1 byte each, for a frozen base."""
    compute: Literal["bf16", "fp32"] = "bf16"
    """The type of products and activations."""

    trainable: ClassVar[bool] = False
    bytes_per_weight: ClassVar[float] = 1

    def quantises(self, name: str) -> bool:
        """Every linear layer inside the blocks."""
        return in_blocks(name)

    def convert(self, linear: Any) -> Any:
        """The int8 twin of a linear layer."""
        from simpletune.quant.int8_linear import Int8Linear

        return Int8Linear.from_linear(linear, self.compute_dtype())
