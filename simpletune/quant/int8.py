"""int8 weights with one scale per output channel, for a frozen base: the lean linear.

A stock int8 linear keeps its input, or a dequantised copy of its weight, for the backward pass. This one keeps
references to the int8 weight and the scale only: the input needs no gradient of a frozen weight, and the weight is
dequantised again when the input's gradient is due.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from simpletune.quant.precision import QuantisedPrecision


class Int8(QuantisedPrecision):
    """int8 weights in the blocks, one scale per output channel; the base is frozen."""

    weights: Literal["int8"] = "int8"
    """int8 weights, 1 byte each, for a frozen base."""

    bytes_per_weight: ClassVar[float] = 1

    def convert(self, name: str, linear: Any) -> Any:
        """The int8 twin of a linear layer."""
        from simpletune.quant.int8_linear import Int8Linear

        return Int8Linear.from_linear(linear, self.compute_dtype())
