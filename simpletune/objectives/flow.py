"""Rectified flow, the objective of Stable Diffusion 3 (arXiv:2403.03206).

Shapes: b samples, c = 16 latent channels, h and w are the latent's height and width (an eighth of the picture's).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.models.model_config import ModelConfig
from simpletune.objectives.objective import TrainingObjective

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from simpletune.objectives.solvers import Euler


class Flow(TrainingObjective):
    """Rectified flow. The loss is the unweighted mean squared error of the velocity."""

    name: Literal["flow"] = "flow"
    """Rectified flow, the objective of Stable Diffusion 3."""
    sigma: Literal["logit_normal", "uniform"] = "logit_normal"
    """Density of the noise level sigma: logit-normal (the paper's best, arXiv:2403.03206 section 3.1) or uniform."""
    logit_mean: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """Mean of the logit-normal density; positive values mean more noise."""
    logit_std: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Standard deviation of the logit-normal density."""
    shift: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Timestep shift s in sigma' = s sigma / (1 + (s - 1) sigma). auto: proportional to the side length, 3 at 1024 px,
    at least 1 (arXiv:2403.03206, eq. 23: the square root of the pixel count)."""

    sampler: ClassVar[str] = "Euler"

    def shift_at(self, resolution: int) -> float:
        """Return the timestep shift for a training resolution in pixels."""
        return max(1.0, 3.0 * resolution / 1024) if self.shift == "auto" else self.shift

    def draw(self, stream: np.random.Generator, shift: float) -> float:
        """Draw one shifted noise level in (0, 1), computed in float64."""
        if self.sigma == "uniform":
            sigma = stream.random()
        else:
            sigma = 1.0 / (1.0 + math.exp(-(self.logit_mean + self.logit_std * stream.standard_normal())))
        return shift_sigma(sigma, shift)

    def quantile(self, quantile: float, shift: float) -> float:
        """Return the noise level at a quantile of the density; the evaluation loss uses these fixed levels."""
        if self.sigma == "uniform":
            return shift_sigma(quantile, shift)
        from statistics import NormalDist

        z = NormalDist(self.logit_mean, self.logit_std).inv_cdf(quantile)
        return shift_sigma(1.0 / (1.0 + math.exp(-z)), shift)

    def process(self, scheduler: Callable[[], ModelConfig]) -> FlowProcess:
        """The objective's functions on tensors.

        Args:
            scheduler: gives the model's ``scheduler_config.json``, which a flow does not need.
        """
        return FlowProcess()

    def solver(self, scheduler: ModelConfig, steps: int, skipped: int = 0) -> Euler:
        """Build Euler's method at the noise levels of diffusers' FlowMatchEulerDiscreteScheduler."""
        import torch
        from diffusers import FlowMatchEulerDiscreteScheduler

        from simpletune.objectives.solvers import Euler

        levels = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler))
        levels.set_timesteps(steps)
        return Euler(levels.sigmas.to(torch.float32)[skipped:])


class FlowProcess:
    """Rectified flow on tensors; a noise level is sigma in (0, 1)."""

    def noised(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """z_t of samples [b, c, h, w] at their levels [b]."""
        return interpolate(z_0, noise, level)

    def target(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """What the network should predict: the velocity."""
        return velocity_target(z_0, noise)

    def loss(self, prediction: Tensor, target: Tensor, level: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean squared error, weighted by [b, 1, h or 1, w or 1] if given: an fp32 scalar."""
        return flow_loss(prediction, target, weight)

    def time(self, level: Tensor) -> Tensor:
        """The timestep that the network receives: 1000 sigma."""
        return timestep_of(level)

    def clean(self, z_t: Tensor, prediction: Tensor, level: Tensor) -> Tensor:
        """Estimate z_0 = z_t - sigma velocity."""
        return z_t - level.view(-1, 1, 1, 1) * prediction


def timestep_of(sigma: Tensor) -> Tensor:
    """The timestep that the transformer receives: 1000 sigma."""
    return 1000.0 * sigma


def shift_sigma(sigma: float, shift: float) -> float:
    """sigma' = s sigma / (1 + (s - 1) sigma) (arXiv:2403.03206, eq. 23)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def interpolate(
    z_0: Tensor,  # [b, c, h, w]
    noise: Tensor,  # [b, c, h, w]
    sigma: Tensor,  # [b]
) -> Tensor:  # [b, c, h, w]
    """z_t = (1 - sigma) z_0 + sigma noise (arXiv:2403.03206, eq. 13)."""
    sigma = sigma.view(-1, 1, 1, 1)
    return (1 - sigma) * z_0 + sigma * noise


def velocity_target(z_0: Tensor, noise: Tensor) -> Tensor:
    """dz_t / dsigma = noise - z_0 (arXiv:2403.03206, section 2)."""
    return noise - z_0


def flow_loss(velocity: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the mean squared error over all elements in fp32, weighted by [b, 1, h or 1, w or 1] if given."""
    squares = (velocity.float() - target.float()).square()
    return (squares if weight is None else weight * squares).mean()
