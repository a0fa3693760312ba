"""nf4 weights: 4 bits each, at the quantiles of a normal distribution (arXiv:2305.14314, section 3), in blocks of 64.

Two kinds of layers keep more bits. Layers outside the transformer's blocks stay in the compute type, as with int8. The
blocks' adaLN modulation is int8 by default: its error is the same for every token of a picture, so it does not average
out. On blocks of SD3 Medium's size with random weights, nf4 throughout changes a block's residual update by 23%, nf4
with int8 modulation by 17%, and int8 throughout by 2%.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.quant.precision import QuantisedPrecision, is_block_modulation

if TYPE_CHECKING:
    from torch import nn


class Nf4(QuantisedPrecision):
    """nf4 weights in the blocks with one scale per 64 weights, for a frozen base."""

    weights: Literal["nf4"] = "nf4"
    """nf4 weights, half a byte each, for a frozen base: half of int8's memory and nine times its rounding error."""
    double_quantisation: bool = True
    """Store the scales in 8 bits, not 32: 0.52 instead of 0.56 bytes per weight, and less than 0.1% more error."""
    modulation: Literal["int8", "nf4"] = "int8"
    """Precision of the blocks' adaLN modulation, a third of all weights. int8: a quarter less error in every block;
    nf4: 0.3 GiB less for SD3 Medium."""

    bytes_per_weight: ClassVar[float] = 0.5

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Quantise a linear layer to nf4, or a modulation layer to int8."""
        from simpletune.quant.int8_linear import Int8Linear
        from simpletune.quant.nf4_linear import Nf4Linear

        if self.modulation == "int8" and is_block_modulation(name):
            return Int8Linear.from_linear(linear, self.compute_dtype())
        return Nf4Linear.from_linear(linear, self.compute_dtype(), self.double_quantisation)
