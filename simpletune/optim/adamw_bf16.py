"""AdamW all in bf16, with a compensation buffer: 6 bytes of state a parameter.

What rounding cuts off a weight is kept in a second bf16 number and added before the next update (Kahan summation), so
the pair holds about 16 bits of precision. The running means are rounded stochastically: rounded to nearest, that of the
squares would stand still (a change of 1/1000 is below bf16's resolution).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.optim.adamw import Beta
from simpletune.optim.optimizer import OptimizerOption

if TYPE_CHECKING:
    import torch
    from torch import nn


class AdamWBF16(OptimizerOption):
    """AdamW with bf16 state and compensated bf16 weights."""

    name: Literal["adamw_bf16"] = "adamw_bf16"
    """AdamW all in bf16, with a compensation buffer: 6 bytes of state a parameter."""
    rounding: Literal["compensated"] = "compensated"  # type: ignore[assignment]  # its own way, instead of the common ones
    """Weights are compensated: what rounding cuts off is added to the next update."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""

    bytes_per_parameter: ClassVar[float] = 6
    draws: ClassVar[bool] = True

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The compensated optimizer."""
        from simpletune.optim.compensated import CompensatedAdamW

        return CompensatedAdamW(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
