"""Schedule-free AdamW (arXiv:2405.15682): averages the weights while it trains, instead of lowering the learning rate.

The step is our own: the authors' package (schedulefree 1.4) keeps its counters outside the state that a checkpoint
saves, and counts once per call, although parameters may be updated in portions. The tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.adamw import Beta
from simpletune.engine.optim.optimizer import OptimizerOption

if TYPE_CHECKING:
    import torch
    from torch import nn

    from simpletune.engine.optim.ema import Average


class ScheduleFreeAdamW(OptimizerOption):
    """AdamW whose result is an average over the whole run."""

    name: Literal["adamw_schedule_free"] = "adamw_schedule_free"
    """Schedule-free AdamW; 8 bytes of state per fp32 parameter. Pictures, the validation loss and the result use the
    average of the weights. Use schedule constant, with or without warm-up."""
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], Beta] = (0.9, 0.999)
    """Share of the average in the weights that gradients are computed at, and decay rate of the running mean of
    squares."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""
    r: Annotated[float, Field(ge=0)] = 0.0
    """Weight of step k in the average is proportional to k^r; larger values favour later steps."""
    weight_lr_power: Annotated[float, Field(ge=0)] = 2.0
    """Exponent of the learning rate in that weight; above 0, steps of the warm-up count less."""

    bytes_per_parameter: ClassVar[float] = 8
    averages: ClassVar[bool] = True

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer."""
        from simpletune.engine.optim.schedule_free_steps import ScheduleFreeSteps

        return ScheduleFreeSteps(
            parameters, self.model_dump(include={"lr", "betas", "eps", "weight_decay", "r", "weight_lr_power"})
        )

    def average(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Average:
        """Return the average that the optimizer keeps."""
        from simpletune.engine.optim.schedule_free_steps import ScheduleFreeAverage

        return ScheduleFreeAverage(optimizer, parameters, self.betas[0])
