"""AdamW entirely in bf16 with a compensation buffer: 6 bytes of state per parameter.

A second bf16 number stores the rounding error of each weight and is added before the next update (Kahan summation), so
the pair has about 16 bits of precision. The running means are rounded stochastically: with rounding to nearest, the
mean of squares would not change (a relative change of 1/1000 is below bf16's resolution).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.adamw import Beta
from simpletune.engine.optim.optimizer import OptimizerOption

if TYPE_CHECKING:
    import torch
    from torch import nn


class AdamWBF16(OptimizerOption):
    """AdamW with bf16 state and compensated bf16 weights."""

    name: Literal["adamw_bf16"] = "adamw_bf16"
    """AdamW entirely in bf16 with a compensation buffer: 6 bytes of state per parameter."""
    rounding: Literal["compensated"] = "compensated"  # type: ignore[assignment]  # replaces the base class's values
    """Add the rounding error of each weight to its next update (Kahan summation)."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    bytes_per_parameter: ClassVar[float] = 6
    draws: ClassVar[bool] = True

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the compensated optimizer."""
        from simpletune.engine.optim.bf16_updates import CompensatedAdamW

        return CompensatedAdamW(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
