"""Rectified flow, the objective of Stable Diffusion 3 (arXiv:2403.03206): its options and noise levels, and
noising, target, loss and solver on tensors.

Shapes: b samples, c = 16 latent channels, h and w are the latent's height and width (an eighth of the picture's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.objectives.conventions import USUAL, FlowConventions
from simpletune.models.objectives.densities import STEEPEST, Beta, CosMap, Density, LogitNormal, Mode, Uniform, between
from simpletune.models.objectives.huber import Huber, errors
from simpletune.models.objectives.objective import OTHER_NOISE, TrainingObjective
from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


RAREST = 1e-6
"""Least share of the density that may lie between min_sigma and max_sigma."""

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""diffusers' scheduler of flows, whose noise levels sampling takes."""
FOR_UNETS = "DPMSolverMultistepScheduler"
"""diffusers' scheduler of flows for its pipelines of UNets, which cannot use the other; its first order is Euler's
method."""
SCHEDULE = frozenset(
    "num_train_timesteps shift use_dynamic_shifting base_shift max_shift base_image_seq_len max_image_seq_len "
    "invert_sigmas shift_terminal use_karras_sigmas use_exponential_sigmas use_beta_sigmas time_shift_type "
    "stochastic_sampling".split()
)
"""The keys of its configuration."""

Shape = Annotated[float, Field(ge=0.05, le=20)]
COMFYUI = (
    "It was trained by rectified flow, which no program reads from a file. In ComfyUI, put the node ModelSamplingSD3 "
    "with shift {shift:g} between the model (with its LoRAs) and the sampler, and use the sampler euler."
)


class Flow(TrainingObjective):
    """Rectified flow. The loss is the mean error of the velocity, the same at every noise level."""

    name: Literal["flow"] = "flow"
    """Rectified flow, the objective of Stable Diffusion 3, and of models with a UNet that were retrained by it
    (bigASP 2.5, NoobAI-RF). No file of the latter says so: a base that predicts noise needs ddpm."""
    sigma: Literal["logit_normal", "uniform", "mode", "cosmap", "beta"] = "logit_normal"
    """Density of the noise level sigma (timestep sampling, arXiv:2403.03206 section 3.1). logit_normal: the paper's
    best; uniform: where a configuration for a UNet begins; mode: favours the middle and keeps the ends; cosmap: the
    cosine schedule's; beta: the Beta distribution."""
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
    shift: Annotated[float, Field(gt=0, le=1e6)] | Literal["auto", "resolution"] = "auto"
    """Timestep shift s in sigma' = s sigma / (1 + (s - 1) sigma). auto: proportional to the side length, 3 at 1024 px,
    at least 1 (arXiv:2403.03206, eq. 23: the square root of the pixel count); resolution: the same with 1 at 1024 px
    and no least. A configuration for a UNet begins with 2.5, and its pictures are drawn with the same shift."""
    levels: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Train on this many noise levels: the middles of as many equally probable parts of the density; null: on any. With
    memory.modulation plan and a base in int8 or nf4, the modulations of all of them are computed before the first step
    and kept in host memory, and the weights that make them stay in the file of the quantised base: for Qwen-Image 4.2
    MiB a level in place of 6.4 GiB. Pictures and the validation loss use any level. SD3's modulations depend on the
    prompt, too, and stay as they are."""
    round_time: bool = False
    """Tell the UNet of SDXL, SD 1.5 or 2 whole timesteps, 999 sigma rounded down, as forks of sd-scripts do in
    training; false: 1000 sigma, as programs draw. Pictures are always drawn with the latter."""
    huber: Huber | None = None
    """Pseudo-Huber loss; null: mean squared error. The validation loss follows."""

    sampler: ClassVar[str] = "Euler"

    def shift_at(self, resolution: float) -> float:
        if self.shift == "resolution":
            return resolution / 1024
        return max(1.0, 3.0 * resolution / 1024) if self.shift == "auto" else self.shift

    def rules(self, resolutions: Iterable[int] = ()) -> Iterator[Problem]:
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
        for resolution in resolutions if self.min_sigma < self.max_sigma else ():
            low, high = (unshift_sigma(sigma, self.shift_at(resolution)) for sigma in (self.min_sigma, self.max_sigma))
            if self._density().cdf(high) - self._density().cdf(low) < RAREST:
                yield Problem(
                    "objective.min_sigma",
                    f"less than {RAREST:g} of the density {self.sigma} lies between {self.min_sigma:g} and "
                    f"{self.max_sigma:g}. Widen the range, or use sigma uniform",
                )

    def problems(self, scheduler: Callable[[], ModelConfig], conventions: FlowConventions = USUAL) -> Iterator[Problem]:
        config = scheduler()
        if conventions.shift is not None:  # the scheduler tells nothing about the flow
            if (name := str(config.get("_class_name"))).startswith(OTHER_NOISE):
                yield Problem(
                    "objective.name",
                    f"flow, but the model's scheduler is {name} (as in Playground 2.5 and CosXL), whose network reads "
                    "other times and latents. Use another model",
                )
            return
        if self.round_time:
            yield Problem("objective.round_time", "true is for models with a UNet alone. Use false")
        known = (*SCHEDULE, "auto_map")  # the latter names code for transformers, which is never run
        unknown = [key for key, value in config.items() if key not in known and value not in (None, False)]
        unknown = [key for key in unknown if not key.startswith("_")]
        # What other schedulers than those of flows are told does not concern a flow, unless they can sample one.
        if not str(config.get("_class_name", SCHEDULER)).startswith("FlowMatch"):
            unknown = [key for key in unknown if key == "use_flow_sigmas"]
        if unknown:
            named = ", ".join(f"{key} {config[key]!r}" for key in unknown)
            yield Problem(
                "objective.name",
                f"flow cannot use the model's scheduler config: {named} may change the noise levels of pictures, but "
                f"is no option of diffusers' {SCHEDULER}. Remove it there, or use a model with that scheduler",
            )

    def draw(self, stream: np.random.Generator, shift: float) -> float:
        """Draw one shifted noise level in (0, 1), computed in float64."""
        if self.levels is not None:
            return self._level(int(stream.integers(self.levels)), shift)
        if self.sigma == "logit_normal" and (self.min_sigma, self.max_sigma) == (0, 1):
            sigma = 1.0 / (1.0 + math.exp(-(self.logit_mean + self.logit_std * stream.standard_normal())))
            return shift_sigma(sigma, shift)
        return self.quantile(stream.random(), shift)

    @property
    def draws_from_few(self) -> bool:
        return self.levels is not None

    def levels_at(self, shift: float) -> Sequence[float]:
        return tuple(self._level(number, shift) for number in range(self.levels or 0))

    def _level(self, number: int, shift: float) -> float:
        assert self.levels is not None
        return self.quantile((number + 0.5) / self.levels, shift)

    def quantile(self, quantile: float, shift: float) -> float:
        low, high = unshift_sigma(self.min_sigma, shift), unshift_sigma(self.max_sigma, shift)
        return shift_sigma(between(self._density(), quantile, low, high), shift)

    def _density(self) -> Density:
        densities: dict[str, Density] = {
            "logit_normal": LogitNormal(self.logit_mean, self.logit_std),
            "uniform": Uniform(),
            "mode": Mode(self.mode_scale),
            "cosmap": CosMap(),
            "beta": Beta(self.beta_alpha, self.beta_beta),
        }
        return densities[self.sigma]

    def describe(self, scheduler: ModelConfig | None, source: str) -> str:
        shift = "by resolution" if isinstance(self.shift, str) else f"{self.shift:g}"
        return f"the velocity noise - z_0 of rectified flow, by objective.name; shift {shift}"

    def usage(self, conventions: FlowConventions) -> str | None:
        return None if conventions.shift is None else COMFYUI.format(shift=conventions.shift)

    def scheduler_config(self, scheduler: ModelConfig, conventions: FlowConventions = USUAL) -> dict[str, Any]:
        found = self.diffusers_scheduler(conventions)
        # nothing of a base that predicted v stays, which would leave its marks in a single file
        return dict(scheduler) if found is None else {"_class_name": found[0], **found[1]}

    def diffusers_scheduler(self, conventions: FlowConventions = USUAL) -> tuple[str, dict[str, object]] | None:
        if conventions.shift is None:
            return None
        told = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": conventions.shift}
        return FOR_UNETS, {**told, "solver_order": 1}

    def process(self, scheduler: Callable[[], ModelConfig], conventions: FlowConventions) -> FlowProcess:
        """Build the process; a flow needs no scheduler's configuration."""
        return FlowProcess(self.huber, conventions, self.round_time)

    def solver(
        self,
        scheduler: ModelConfig,
        steps: int,
        skipped: int,
        conventions: FlowConventions,
        tokens: Callable[[], int],
    ) -> Euler:
        """Build Euler's method at the noise levels of diffusers' FlowMatchEulerDiscreteScheduler."""
        import torch
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.require(scheduler, conventions)
        told = dict(scheduler) if conventions.shift is None else {"shift": conventions.shift}
        levels = FlowMatchEulerDiscreteScheduler.from_config(told)
        if steps == 1 and levels.config.shift_terminal:  # diffusers divides 0 by 0
            raise UserError(
                f"the model's scheduler ends its steps at the noise level {levels.config.shift_terminal:g} "
                "(shift_terminal), for which 1 step is too few. Use at least 2"
            )
        shift = conventions.mu(levels.config, tokens(), steps) if levels.config.use_dynamic_shifting else None
        first = [1.0 - step / steps for step in range(steps)] if conventions.from_one else None
        levels.set_timesteps(steps, sigmas=first, mu=shift)
        return Euler(levels.sigmas.to(torch.float32)[skipped:], conventions)


class FlowProcess:
    """Rectified flow on tensors, a ``NoisingProcess``; a noise level is sigma in (0, 1)."""

    def __init__(self, huber: Huber | None = None, conventions: FlowConventions = USUAL, round_time: bool = False):
        self.huber, self.sign = huber, conventions.sign
        self.time: Callable[[Tensor], Tensor] = whole_time if round_time else conventions.time

    def noised(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Compute z_t = (1 - sigma) z_0 + sigma noise (arXiv:2403.03206, eq. 13)."""
        sigma = level.view(-1, 1, 1, 1)
        return (1 - sigma) * z_0 + sigma * noise

    def target(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Compute the velocity dz_t / dsigma = noise - z_0 (arXiv:2403.03206, section 2), with the network's sign."""
        return noise - z_0 if self.sign > 0 else z_0 - noise

    def split(self, z_t: Tensor, prediction: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return z_0 = z_t - sigma velocity and noise = z_t + (1 - sigma) velocity."""
        sigma, velocity = level.view(-1, 1, 1, 1), prediction if self.sign > 0 else -prediction
        return z_t - sigma * velocity, z_t + (1 - sigma) * velocity

    def loss(self, prediction: Tensor, target: Tensor, level: Tensor, weight: Tensor | None = None) -> Tensor:
        """Compute the mean over all elements of ``weight`` times the error."""
        found = errors(prediction, target, None if self.huber is None else self.huber.c_at(level, 1 - level))
        return (found if weight is None else weight * found).mean()


class Euler:
    """Integrates dz/dsigma = velocity by Euler's method (arXiv:2206.00364, alg. 1).

    Args:
        sigmas: [s + 1], fp32, on the CPU: the noise levels of the steps, followed by 0.
        conventions: the network's.
    """

    def __init__(self, sigmas: Tensor, conventions: FlowConventions = USUAL):
        self.sigmas, self.levels = sigmas, sigmas[:-1]
        self._process = FlowProcess(conventions=conventions)
        self.times = self._process.time(self.levels)

    def start(self, noise: Tensor, z_0: Tensor | None) -> Tensor:
        return noise if z_0 is None else self.noised(z_0, noise, 0)

    def noised(self, z_0: Tensor, noise: Tensor, index: int) -> Tensor:
        return self._process.noised(z_0, noise, self.sigmas[index : index + 1].to(noise.device))

    def step(self, prediction: Tensor, index: int, z: Tensor) -> Tensor:
        """Return z + (sigma_next - sigma) velocity."""
        now, then = self.sigmas[index], self.sigmas[index + 1]
        return z + (then - now if self._process.sign > 0 else now - then).to(z.device) * prediction


def whole_time(sigma: Tensor) -> Tensor:  # [n] -> [n], int64
    """Return 999 sigma rounded down (bluvoll/sd-scripts, ``get_noise_noisy_latents_and_timesteps``)."""
    return (sigma * 999).long()


def shift_sigma(sigma: float, shift: float) -> float:
    """Compute sigma' = s sigma / (1 + (s - 1) sigma) (arXiv:2403.03206, eq. 23)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def unshift_sigma(shifted: float, shift: float) -> float:
    return shifted / (shift - (shift - 1.0) * shifted)
