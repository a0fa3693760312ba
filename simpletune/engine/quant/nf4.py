"""nf4 weights: 4 bits each, at the quantiles of a normal distribution (arXiv:2305.14314, section 3), in blocks of 64.

Three kinds of layers keep more bits. Layers outside the model's blocks stay in the compute type, as with int8.
Convolutions are int8. The blocks' modulation is int8 by default: its error is the same for every token of a picture, so
it does not average out. On blocks of SD3 Medium's size with random weights, nf4 throughout changes a block's residual
update by 23%, nf4 with int8 modulation by 17%, and int8 throughout by 2%.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.engine.quant.precision import QuantisedPrecision, describe_rotation, is_block_modulation

if TYPE_CHECKING:
    from torch import nn


class Nf4(QuantisedPrecision):
    """nf4 weights in the blocks' linear layers with one scale per 64 weights, for a frozen base."""

    weights: Literal["nf4"] = "nf4"
    """nf4 weights, half a byte each, for a frozen base: half of int8's memory and nine times its rounding error.
    Convolutions (69% of SD 1.5's weights) are int8."""
    double_quantisation: bool = True
    """Store the scales in 8 bits, not 32: 0.52 instead of 0.56 bytes per weight, and less than 0.1% more error."""
    modulation: Literal["int8", "nf4"] = "int8"
    """Precision of the blocks' modulation: adaLN, a third of SD3's weights; time_emb_proj, 3% of SD 1.5's. int8: a
    quarter less error in every block of SD3; nf4: 0.3 GiB less for SD3 Medium."""
    rotation: Literal["none", "hadamard"] = "none"
    """Rotate the linear layers' weights, and their inputs in every pass, by a block Hadamard matrix of 256, 64 or 16
    columns (arXiv:2512.03673), so that outliers do not decide the scales: a sixth less error where weights have heavy
    tails. Costs time. Convolutions are not rotated."""

    bytes_per_weight: ClassVar[float] = 0.5

    def describe_matmul(self) -> str:
        """Describe how products are computed."""
        return super().describe_matmul() + describe_rotation(self.rotation)

    def convert(self, name: str, layer: nn.Module) -> nn.Module:
        """Quantise a linear layer to nf4, or a modulation layer or a convolution to int8."""
        from torch import nn

        from simpletune.engine.quant.int8_conv import Int8Conv2d
        from simpletune.engine.quant.int8_linear import Int8Linear
        from simpletune.engine.quant.nf4_linear import Nf4Linear

        if isinstance(layer, nn.Conv2d):
            return Int8Conv2d.from_conv(layer, self.compute_dtype())
        assert isinstance(layer, nn.Linear)
        is_modulation = is_block_modulation(name)
        twin: Int8Linear | Nf4Linear
        if self.modulation == "int8" and is_modulation:
            twin = Int8Linear.from_linear(layer, self.compute_dtype(), self.rotation)
        else:
            twin = Nf4Linear.from_linear(layer, self.compute_dtype(), self.double_quantisation, self.rotation)
        twin.rotates_weight = not is_modulation
        return twin
