"""Replacements for what a simulated drawing would read values from: noise levels and a window's modulation."""

from __future__ import annotations

import torch
from torch import Tensor

from simpletune.models.families import Model
from simpletune.models.objectives.flow import Euler
from simpletune.models.objectives.objective import TrainingObjective
from simpletune.stages.modulation_plan import ModulationSource


class ShapesOnlyModel:
    """A family for sampling whose noise levels have no values.

    Args:
        family: the run's model family.
    """

    def __init__(self, family: Model):
        self.latent_shape, self.predict, self.objective = family.latent_shape, family.predict, family.objective

    def solver(self, objective: TrainingObjective, steps: int, skipped: int = 0) -> Euler:
        """Return a solver whose levels have no values; a real one keeps at most two more latents."""
        return Euler(torch.zeros(steps + 1 - skipped))


class WholeWindowModulation:
    """Compute the modulation of a whole window of sampling steps, and return the part for the few simulated steps.

    Args:
        modulation: the transformer's modulation.
        steps: the steps of a validation picture.
        simulated: the number of simulated steps.
    """

    def __init__(self, modulation: ModulationSource, steps: int, simulated: int):
        self.modulation, self.window = modulation, modulation.window
        self.ratio = min(self.window, steps) / min(self.window, simulated)

    def __call__(self, sigma: Tensor, pooled: Tensor) -> Tensor:  # [n], [n, p] -> [n, m]
        """Return the first rows of the whole window's modulation."""
        rows = round(len(sigma) * self.ratio)
        return self.modulation(sigma[:1].expand(rows), pooled[:1].expand(rows, -1))[: len(sigma)]
