"""Prodigy (arXiv:2306.06101): AdamW that estimates its learning rate from the distance to the initial weights.

The step is our own: the authors' package (prodigyopt 1.1) reads two scalars per parameter from the device in every
step, and keeps the estimate outside the state that a checkpoint saves. The tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.adamw import Beta
from simpletune.engine.optim.optimizer import OptimizerOption
from simpletune.system.options import Problem

if TYPE_CHECKING:
    import torch
    from torch import nn


class Prodigy(OptimizerOption):
    """Prodigy with decoupled weight decay."""

    name: Literal["prodigy"] = "prodigy"
    """Prodigy: AdamW that estimates its learning rate; 16 bytes of state per fp32 parameter."""
    lr: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the estimated learning rate; keep it near 1."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    beta3: Beta | None = None
    """Decay rate of the estimate's running sums; null: the square root of the second beta."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator, times the estimate, for numerical stability."""
    d0: Annotated[float, Field(gt=0)] = 1e-6
    """First estimate of the learning rate."""
    d_coef: Annotated[float, Field(gt=0)] = 1.0
    """Factor on later estimates; 0.5 to 2 are common."""
    use_bias_correction: bool = False
    """Correct the running means for their start at 0, as Adam does."""
    safeguard_warmup: bool = False
    """Leave the learning rate out of the estimate's denominator, so that warm-up does not inflate the estimate."""

    bytes_per_parameter: ClassVar[float] = 16
    steps_in_backward: ClassVar[bool] = False
    no_fsdp_reason: ClassVar[str | None] = "estimates one learning rate from all gradients"

    def rules(self) -> Iterator[Problem]:
        """Refuse a learning rate that was meant for another optimizer."""
        if self.lr < 0.1:
            yield Problem(
                "optimizer.lr", f"{self.lr:g} would scale down the learning rate that prodigy estimates. Use 1"
            )

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer."""
        from simpletune.engine.optim.prodigy_steps import ProdigySteps

        beta3 = self.betas[1] ** 0.5 if self.beta3 is None else self.beta3
        settings = self.model_dump(include={"lr", "eps", "weight_decay", "d0", "d_coef"})
        flags = {"corrects": self.use_bias_correction, "safeguards": self.safeguard_warmup}
        return ProdigySteps(parameters, settings | flags | {"betas": (*self.betas, beta3)})
