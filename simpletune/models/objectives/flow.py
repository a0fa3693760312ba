"""Rectified flow, the objective of Stable Diffusion 3 (arXiv:2403.03206): its options and its noise levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.models.objectives.densities import STEEPEST, Beta, CosMap, Density, LogitNormal, Mode, Uniform, between
from simpletune.models.objectives.flow_process import FlowProcess
from simpletune.models.objectives.huber import Huber
from simpletune.models.objectives.objective import TrainingObjective
from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.options import Problem

if TYPE_CHECKING:
    import numpy as np

    from simpletune.models.objectives.solvers import Euler


RAREST = 1e-6
"""Least share of the density that may lie between min_sigma and max_sigma."""

Shape = Annotated[float, Field(ge=0.05, le=20)]


class Flow(TrainingObjective):
    """Rectified flow. The loss is the mean error of the velocity, the same at every noise level."""

    name: Literal["flow"] = "flow"
    """Rectified flow, the objective of Stable Diffusion 3."""
    sigma: Literal["logit_normal", "uniform", "mode", "cosmap", "beta"] = "logit_normal"
    """Density of the noise level sigma (timestep sampling, arXiv:2403.03206 section 3.1). logit_normal: the paper's
    best; uniform; mode: favours the middle and keeps the ends; cosmap: the cosine schedule's; beta: the Beta
    distribution."""
    logit_mean: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """Mean of the logit-normal density; positive values mean more noise."""
    logit_std: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Standard deviation of the logit-normal density."""
    mode_scale: Annotated[float, Field(ge=-1, le=STEEPEST)] = 1.29
    """Scale s of the mode density: 0 is uniform, larger values favour the middle."""
    beta_alpha: Shape = 2.0
    """First shape of the beta density; larger values mean more noise."""
    beta_beta: Shape = 2.0
    """Second shape of the beta density; larger values mean less noise."""
    min_sigma: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lowest noise level to train on, after the shift; the density keeps its shape above it."""
    max_sigma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Highest noise level to train on, after the shift."""
    shift: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Timestep shift s in sigma' = s sigma / (1 + (s - 1) sigma). auto: proportional to the side length, 3 at 1024 px,
    at least 1 (arXiv:2403.03206, eq. 23: the square root of the pixel count)."""
    huber: Huber | None = None
    """Pseudo-Huber loss; null: mean squared error. The validation loss follows."""

    sampler: ClassVar[str] = "Euler"

    def shift_at(self, resolution: int) -> float:
        """Return the timestep shift for a training resolution in pixels."""
        return max(1.0, 3.0 * resolution / 1024) if self.shift == "auto" else self.shift

    def rules(self) -> Iterator[Problem]:
        """Check the range of noise levels, and report shapes of densities that are not used."""
        if self.min_sigma >= self.max_sigma:
            yield Problem(
                "objective.min_sigma",
                f"{self.min_sigma:g} is not below objective.max_sigma {self.max_sigma:g}. Use less, such as 0",
            )
        for field, density in {"mode_scale": "mode", "beta_alpha": "beta", "beta_beta": "beta"}.items():
            if self.sigma != density and getattr(self, field) != type(self).model_fields[field].default:
                yield Problem(
                    f"objective.{field}",
                    f"{getattr(self, field):g} changes nothing with objective.sigma {self.sigma}. Leave it out, or use "
                    f"sigma {density}",
                )

    def density_rules(self, resolution: int) -> Iterator[Problem]:
        """Check that some noise levels lie within the range."""
        low, high = (unshift_sigma(sigma, self.shift_at(resolution)) for sigma in (self.min_sigma, self.max_sigma))
        if self.min_sigma < self.max_sigma and self._density().cdf(high) - self._density().cdf(low) < RAREST:
            yield Problem(
                "objective.min_sigma",
                f"less than {RAREST:g} of the density {self.sigma} lies between {self.min_sigma:g} and "
                f"{self.max_sigma:g}. Widen the range, or use sigma uniform",
            )

    def draw(self, stream: np.random.Generator, shift: float) -> float:
        """Draw one shifted noise level in (0, 1), computed in float64."""
        if self.sigma == "logit_normal" and self._is_whole:
            sigma = 1.0 / (1.0 + math.exp(-(self.logit_mean + self.logit_std * stream.standard_normal())))
            return shift_sigma(sigma, shift)
        return self.quantile(stream.random(), shift)

    def quantile(self, quantile: float, shift: float) -> float:
        """Return the noise level at a quantile of the density; the validation loss uses these fixed levels."""
        low, high = unshift_sigma(self.min_sigma, shift), unshift_sigma(self.max_sigma, shift)
        return shift_sigma(between(self._density(), quantile, low, high), shift)

    @property
    def _is_whole(self) -> bool:
        return self.min_sigma == 0 and self.max_sigma == 1

    def _density(self) -> Density:
        densities: dict[str, Density] = {
            "logit_normal": LogitNormal(self.logit_mean, self.logit_std),
            "uniform": Uniform(),
            "mode": Mode(self.mode_scale),
            "cosmap": CosMap(),
            "beta": Beta(self.beta_alpha, self.beta_beta),
        }
        return densities[self.sigma]

    def process(self, scheduler: Callable[[], ModelConfig]) -> FlowProcess:
        """The objective's functions on tensors.

        Args:
            scheduler: returns the model's ``scheduler_config.json``, which a flow does not need.
        """
        return FlowProcess(self.huber)

    def solver(self, scheduler: ModelConfig, steps: int, skipped: int = 0) -> Euler:
        """Build Euler's method at the noise levels of diffusers' FlowMatchEulerDiscreteScheduler."""
        import torch
        from diffusers import FlowMatchEulerDiscreteScheduler

        from simpletune.models.objectives.solvers import Euler

        levels = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler))
        levels.set_timesteps(steps)
        return Euler(levels.sigmas.to(torch.float32)[skipped:])


def shift_sigma(sigma: float, shift: float) -> float:
    """sigma' = s sigma / (1 + (s - 1) sigma) (arXiv:2403.03206, eq. 23)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def unshift_sigma(shifted: float, shift: float) -> float:
    """Invert ``shift_sigma``."""
    return shifted / (shift - (shift - 1.0) * shifted)
