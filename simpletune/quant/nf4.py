"""nf4 weights: 4 bits each, on the quantiles of a normal distribution (arXiv:2305.14314, section 3), in blocks of 64.

Two layers are left in more bits. What stands outside the transformer's blocks keeps the compute type, as with int8. And
the blocks' adaLN modulation is held in int8 unless asked otherwise: its error is the same for every token of a picture,
so nothing averages it out. On blocks of SD3 Medium's size with random weights, nf4 throughout changes what a block adds
by 23%, with the modulation in int8 by 17%; for int8 throughout it is 2%.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.quant.precision import QuantisedPrecision, is_block_modulation

if TYPE_CHECKING:
    from torch import nn


class Nf4(QuantisedPrecision):
    """nf4 weights in the blocks, one scale per 64 of them; the base is frozen."""

    weights: Literal["nf4"] = "nf4"
    """nf4 weights, half a byte each, for a frozen base: half of int8's memory, and nine times its rounding error."""
    double_quantisation: bool = True
    """Hold the blocks' scales in 8 bits instead of 32: 0.52 instead of 0.56 bytes per weight, and an error that grows
    by less than a thousandth of itself."""
    modulation: Literal["int8", "nf4"] = "int8"
    """How the blocks' adaLN modulation, a third of all weights, is held. int8: a quarter less error in every block;
    nf4: 0.3 GiB less for SD3 Medium."""

    bytes_per_weight: ClassVar[float] = 0.5

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """The nf4 twin of a linear layer, or the int8 twin of a modulation's."""
        from simpletune.quant.int8_linear import Int8Linear
        from simpletune.quant.nf4_linear import Nf4Linear

        if self.modulation == "int8" and is_block_modulation(name):
            return Int8Linear.from_linear(linear, self.compute_dtype())
        return Nf4Linear.from_linear(linear, self.compute_dtype(), self.double_quantisation)
