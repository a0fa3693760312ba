"""Denoising diffusion in discrete timesteps (arXiv:2006.11239), the objective of Stable Diffusion 1 and 2.

Shapes: b samples, c latent channels, h and w are the latent's height and width (an eighth of the picture's), T = 1000
timesteps. abar_t is the cumulative product of 1 - beta up to timestep t; SNR = abar / (1 - abar).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.objectives.conventions import USUAL, FlowConventions
from simpletune.models.objectives.huber import Huber, errors
from simpletune.models.objectives.objective import OTHER_NOISE, TrainingObjective
from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.options import Problem

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

TIMESTEPS = 1000
PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v"}  # diffusers' names and ours
DIFFUSERS = {ours: theirs for theirs, ours in PREDICTIONS.items()}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}  # in a scheduler config
NEEDS_V = "needs v-prediction: at an SNR of zero, z_t is the noise itself, and predicting it teaches nothing."


class Ddpm(TrainingObjective):
    """Noise prediction or v-prediction at uniformly drawn timesteps."""

    name: Literal["ddpm"] = "ddpm"
    """Denoising diffusion (DDPM): Stable Diffusion 1 and 2."""
    prediction: Literal["auto", "epsilon", "v"] = "auto"
    """What the network predicts. epsilon: the noise (SD 1.5, 2 base); v: sqrt(abar) noise - sqrt(1 - abar) z_0
    (arXiv:2202.00512; SD 2.1 at 768 px); auto: what the model's scheduler config names."""
    min_snr_gamma: Annotated[float, Field(gt=0)] | None = None
    """Weight the loss of each sample by min(SNR, gamma) / SNR, or with v by min(SNR, gamma) / (SNR + 1)
    (arXiv:2303.09556); 5 is common; null: no weights. With zero_terminal_snr the last timestep's weight is 0."""
    offset_noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Add this much normal noise that is constant over each channel of a sample, so that overall brightness is learned;
    0.05 to 0.1 are common."""
    zero_terminal_snr: bool = False
    """Rescale the betas to an SNR of zero at the last timestep (arXiv:2305.08891, algorithm 1), and draw pictures with
    trailing timesteps. Needs v-prediction."""
    min_timestep: Annotated[int, Field(ge=0, lt=TIMESTEPS)] = 0
    """Lowest (least noisy) timestep to train on."""
    max_timestep: Annotated[int, Field(ge=0, lt=TIMESTEPS)] = TIMESTEPS - 1
    """Highest (noisiest) timestep to train on, inclusive."""
    huber: Huber | None = None
    """Pseudo-Huber loss; null: mean squared error. The validation loss follows."""

    sampler: ClassVar[str] = "DPM++ 2M"

    def rules(self, resolutions: Iterable[int] = ()) -> Iterator[Problem]:
        if self.min_timestep > self.max_timestep:
            yield Problem(
                "objective.min_timestep",
                f"{self.min_timestep} is above objective.max_timestep {self.max_timestep}. Use at most that",
            )
        if self.zero_terminal_snr and self.prediction == "epsilon":
            yield Problem("objective.zero_terminal_snr", f"true {NEEDS_V} Use objective.prediction v, or false")

    def is_idle(self, scheduler: ModelConfig) -> bool:
        ends_in_noise = self.zero_terminal_snr or scheduler.get("rescale_betas_zero_snr")
        return bool(ends_in_noise) and self.min_snr_gamma is not None and self.min_timestep == TIMESTEPS - 1

    def problems(self, scheduler: Callable[[], ModelConfig], conventions: FlowConventions = USUAL) -> Iterator[Problem]:
        config = scheduler()
        if (name := str(config.get("_class_name"))).startswith(OTHER_NOISE):
            yield Problem(
                "objective.name",
                f"ddpm cannot train the noise of the model's scheduler, {name} (as in Playground 2.5 and CosXL). Use a "
                "model with the noise of Stable Diffusion",
            )
            return
        flows = name.startswith("FlowMatch") or config.get("use_flow_sigmas")
        if flows and conventions.shift is not None:  # of a family that may be either
            yield Problem(
                "objective.name",
                f"ddpm, but the model's scheduler, {name}, is one of rectified flow. Use objective.name flow, or a "
                "model that predicts noise",
            )
            return
        predicted = config.get("prediction_type", "epsilon")
        if self.prediction == "auto" and predicted not in PREDICTIONS:
            yield Problem(
                "objective.prediction",
                f"the model's scheduler config has prediction_type {predicted!r}; only epsilon and v_prediction can be "
                "trained. Set objective.prediction to epsilon or v if the model was trained for it",
            )
        elif self.prediction_of(config) == "epsilon" and config.get("rescale_betas_zero_snr"):
            yield Problem(
                "objective.prediction", f"the model's rescale_betas_zero_snr {NEEDS_V} Use objective.prediction v"
            )
        elif self.prediction_of(config) == "epsilon" and self.zero_terminal_snr and self.prediction == "auto":
            yield Problem(
                "objective.zero_terminal_snr",
                f"true {NEEDS_V} The model's prediction_type is epsilon. Use false, or retrain with "
                "objective.prediction v",
            )
        try:
            schedule_of(config)
        except ValueError as error:
            yield Problem("objective.name", f"ddpm cannot use the model's scheduler config: {error}")

    def describe(self, scheduler: ModelConfig | None, source: str) -> str | None:
        if scheduler is None and self.prediction == "auto":
            return None
        trained = self.scheduler_config(scheduler or {})
        by = source if self.prediction == "auto" else "objective.prediction"
        parts = {by: [PREDICTIONS[trained["prediction_type"]]]}
        if trained.get("rescale_betas_zero_snr"):
            by = "objective.zero_terminal_snr" if self.zero_terminal_snr else source
            parts.setdefault(by, []).append("terminal SNR 0")
        return ", ".join(f"{', '.join(words)} ({by})" for by, words in parts.items())

    def draw(self, stream: np.random.Generator, shift: float) -> float:
        """Draw one timestep, uniformly; there is no shift."""
        return float(stream.integers(self.min_timestep, self.max_timestep + 1))

    def quantile(self, quantile: float, shift: float) -> float:
        return float(self.min_timestep + math.floor(quantile * (self.max_timestep + 1 - self.min_timestep)))

    def noise(self, stream: np.random.Generator, shape: Sequence[int]) -> np.ndarray:  # [c, h, w]
        """Draw a sample's noise in fp32: first one normal number per element, then, from the same stream, one per
        channel for ``offset_noise``. In this order the former do not depend on the option."""
        noise = super().noise(stream, shape)
        if self.offset_noise:
            noise += self.offset_noise * stream.standard_normal((shape[0], 1, 1), dtype="float32")
        return noise

    def prediction_of(self, scheduler: ModelConfig) -> str:
        """Return ``epsilon`` or ``v``."""
        if self.prediction != "auto":
            return self.prediction
        return PREDICTIONS[scheduler.get("prediction_type", "epsilon")]

    def scheduler_config(self, scheduler: ModelConfig, conventions: FlowConventions = USUAL) -> dict[str, Any]:
        """Derive the trained model's scheduler config from its base's, in diffusers' format."""
        zero = ZERO_SNR if self.zero_terminal_snr or scheduler.get("rescale_betas_zero_snr") else {}
        return {**scheduler, "prediction_type": DIFFUSERS[self.prediction_of(scheduler)], **zero}

    def process(self, scheduler: Callable[[], ModelConfig], conventions: FlowConventions = USUAL) -> DdpmProcess:
        config = scheduler()
        self.require(config, conventions)
        trained = self.scheduler_config(config)
        alphas_bar = schedule_of(trained)
        if trained.get("rescale_betas_zero_snr"):
            alphas_bar = rescale_to_zero_snr(alphas_bar)
        return DdpmProcess(alphas_bar, trained["prediction_type"] == DIFFUSERS["v"], self.min_snr_gamma, self.huber)

    def solver(
        self,
        scheduler: ModelConfig,
        steps: int,
        skipped: int = 0,
        conventions: FlowConventions = USUAL,
        tokens: object = None,
    ) -> DpmSolver:
        self.require(scheduler, conventions)
        return DpmSolver(self.scheduler_config(scheduler), steps, skipped)

    def diffusers_scheduler(self, conventions: FlowConventions = USUAL) -> tuple[str, dict[str, object]]:
        changes: dict[str, object] = {}
        if self.prediction != "auto":
            changes["prediction_type"] = DIFFUSERS[self.prediction]
        if self.zero_terminal_snr:
            changes |= ZERO_SNR
        return "DPMSolverMultistepScheduler", changes


def schedule_of(scheduler: ModelConfig) -> list[float]:  # [T]
    """Compute abar of every timestep in float64 from the betas of a scheduler config, with diffusers' defaults. Raises
    ValueError if the schedule is unknown."""
    kind, count = scheduler.get("beta_schedule", "linear"), scheduler.get("num_train_timesteps", TIMESTEPS)
    first, last = scheduler.get("beta_start", 0.0001), scheduler.get("beta_end", 0.02)
    if count != TIMESTEPS:
        raise ValueError(f"num_train_timesteps {count} is not {TIMESTEPS}")
    if scheduler.get("trained_betas") is not None:
        raise ValueError("trained_betas are not supported. Name a beta_schedule")
    if kind not in ("linear", "scaled_linear"):
        raise ValueError(f"beta_schedule {kind!r} is neither linear nor scaled_linear")
    if not 0 < first <= last < 1:
        raise ValueError(f"beta_start {first:g} and beta_end {last:g} do not rise between 0 and 1")
    power = 2 if kind == "scaled_linear" else 1
    low, high = first ** (1 / power), last ** (1 / power)
    betas = ((low + (high - low) * t / (TIMESTEPS - 1)) ** power for t in range(TIMESTEPS))
    return list(accumulate((1 - beta for beta in betas), mul))


def rescale_to_zero_snr(alphas_bar: Sequence[float]) -> list[float]:  # [T]
    """Shift and scale sqrt(abar) so that its last value is 0 and its first stays (arXiv:2305.08891, algorithm 1)."""
    roots = [math.sqrt(each) for each in alphas_bar]
    first, last = roots[0], roots[-1]
    return [((root - last) * first / (first - last)) ** 2 for root in roots]


class DdpmProcess:
    """A ``NoisingProcess`` from tables in fp32.

    Args:
        alphas_bar: abar of every timestep.
        v: whether the network predicts v, not the noise.
        gamma: gamma of the min-SNR weights (arXiv:2303.09556); None: no weights.
        huber: the pseudo-Huber loss; None: squared errors.
    """

    def __init__(self, alphas_bar: Sequence[float], v: bool, gamma: float | None, huber: Huber | None = None):
        self.v, self.weighted, self.huber = v, gamma is not None, huber
        weights = [1.0] * len(alphas_bar)
        if gamma is not None:  # min-SNR: min(SNR, gamma) / SNR for noise prediction, / (SNR + 1) for v
            ratios = [each / (1 - each) for each in alphas_bar]
            weights = [min(snr, gamma) / (snr + 1 if v else snr) for snr in ratios]
        self._rows = [[math.sqrt(each) for each in alphas_bar], [math.sqrt(1 - each) for each in alphas_bar], weights]
        self._tables: dict[torch.device, Tensor] = {}  # [3, T]

    def noised(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Compute z_t = sqrt(abar) z_0 + sqrt(1 - abar) noise (arXiv:2006.11239, eq. 4)."""
        signal, spread, _ = self._at(level)
        return signal * z_0 + spread * noise

    def target(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return the noise, or v = sqrt(abar) noise - sqrt(1 - abar) z_0 (arXiv:2202.00512, section 4)."""
        if not self.v:
            return noise
        signal, spread, _ = self._at(level)
        return signal * noise - spread * z_0

    def split(self, z_t: Tensor, prediction: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return z_0 = (z_t - sqrt(1 - abar) noise) / sqrt(abar) and the noise; for v, z_0 = sqrt(abar) z_t -
        sqrt(1 - abar) v and noise = sqrt(1 - abar) z_t + sqrt(abar) v."""
        signal, spread, _ = self._at(level)
        if self.v:
            return signal * z_t - spread * prediction, spread * z_t + signal * prediction
        return (z_t - spread * prediction) / signal, prediction

    def loss(self, prediction: Tensor, target: Tensor, level: Tensor, weight: Tensor | None = None) -> Tensor:
        """Compute the mean error, weighted by level and, if given, by ``weight``."""
        c = None
        if self.huber is not None:
            signal, spread, _ = self._at(level)
            c = self.huber.c_at(level / TIMESTEPS, (signal / (signal + spread)).flatten())
        found = errors(prediction, target, c)
        if weight is not None:
            found = weight * found
        return (self._at(level)[2] * found).mean() if self.weighted else found.mean()

    def time(self, level: Tensor) -> Tensor:  # [b], int64
        """Return the timestep itself."""
        return level.long()

    def _at(self, level: Tensor) -> tuple[Tensor, ...]:  # three [b, 1, 1, 1]
        """Look up sqrt(abar), sqrt(1 - abar) and the weight; the first use on a device copies the tables there."""
        import torch

        if level.device not in self._tables:
            self._tables[level.device] = torch.tensor(self._rows, dtype=torch.float32, device=level.device)
        return self._tables[level.device][:, level.long()].view(3, -1, 1, 1, 1).unbind()


class DpmSolver:
    """DPM-Solver++ (2M) of diffusers: second order after the first step, without noise (arXiv:2211.01095, alg. 2).

    Args:
        config: the model's scheduler config.
        steps: number of steps.
        skipped: how many of the first, noisiest steps to leave out.
    """

    def __init__(self, config: ModelConfig, steps: int, skipped: int = 0):
        from diffusers import DPMSolverMultistepScheduler

        chosen = {"algorithm_type": "dpmsolver++", "solver_order": 2}
        self._scheduler = DPMSolverMultistepScheduler.from_config(dict(config), **chosen)
        self._scheduler.set_timesteps(steps)
        self._scheduler.set_begin_index(skipped)
        self.times = self._scheduler.timesteps[skipped:]
        self.levels = self.times.float()

    def start(self, noise: Tensor, z_0: Tensor | None) -> Tensor:
        if z_0 is None:
            return noise * self._scheduler.init_noise_sigma
        return self.noised(z_0, noise, 0)

    def noised(self, z_0: Tensor, noise: Tensor, index: int) -> Tensor:
        # the scheduler takes the level from its own count of steps, not from the timestep
        return self._scheduler.add_noise(z_0, noise, self.times[index : index + 1].expand(len(z_0)))

    def step(self, prediction: Tensor, index: int, z: Tensor) -> Tensor:
        return self._scheduler.step(prediction, self.times[index], z, return_dict=False)[0]
