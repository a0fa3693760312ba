"""A step that updates each parameter in the backward pass (``memory.optimizer_in_backward``)."""

from __future__ import annotations

from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.stages.step.variant import GradientNorms, PlainStep


class InBackward(PlainStep):
    """Each gradient is clipped, applied and freed as soon as it is complete, so nothing is left to clip or update."""

    def norms(self) -> GradientNorms:
        assert isinstance(self.optimizer, RoundedOptimizer)
        norms, self.optimizer.norms = self.optimizer.norms, {}  # recorded in the backward pass
        return GradientNorms.of(norms)
