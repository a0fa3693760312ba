"""Solvers: each turns the network's predictions into steps from noise to latents.

Shapes: b pictures, c channels, h and w an eighth of the picture's, s steps.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from simpletune.models.objectives.flow import FlowProcess
from simpletune.models.shared.model_config import ModelConfig


class Solver(Protocol):
    """The steps of one drawing. Make a new solver for each: it may keep earlier predictions."""

    levels: Tensor
    """[s], fp32, on the CPU: the noise level of each step, in the objective's terms."""
    times: Tensor
    """[s], on the CPU: what the network receives as its timestep."""

    def start(self, noise: Tensor, z_0: Tensor | None) -> Tensor:  # [b, c, h, w] each
        """Return the first z: the noise, or a starting picture's latents noised to the first level."""

    def step(self, prediction: Tensor, index: int, z: Tensor) -> Tensor:  # [b, c, h, w] each, fp32
        """Return the next z from the network's prediction at step ``index``; steps are taken in order."""


class Euler:
    """Integrates dz/dsigma = velocity by Euler's method (arXiv:2206.00364, alg. 1).

    Args:
        sigmas: [s + 1], fp32, on the CPU: the noise levels of the steps, followed by 0.
    """

    def __init__(self, sigmas: Tensor):
        self.sigmas, self.levels = sigmas, sigmas[:-1]
        self._process = FlowProcess()
        self.times = self._process.time(self.levels)

    def start(self, noise: Tensor, z_0: Tensor | None) -> Tensor:
        sigma = self.sigmas[:1].to(noise.device)
        return noise if z_0 is None else self._process.noised(z_0, noise, sigma)

    def step(self, prediction: Tensor, index: int, z: Tensor) -> Tensor:
        """z + (sigma_next - sigma) velocity."""
        return z + (self.sigmas[index + 1] - self.sigmas[index]).to(z.device) * prediction


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
        return self._scheduler.add_noise(z_0, noise, self.times[:1].expand(len(z_0)))

    def step(self, prediction: Tensor, index: int, z: Tensor) -> Tensor:
        return self._scheduler.step(prediction, self.times[index], z, return_dict=False)[0]
