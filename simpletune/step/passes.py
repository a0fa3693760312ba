"""The passes of a step: a plan's micro-batches, and with a second pass each once more with the prompt of the class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from simpletune.data.plan import Plan
from simpletune.data.samples import Draw
from simpletune.prior import PriorOption


class Passes:
    """Selects the draws of each pass, and what their targets are.

    A second pass follows its micro-batch: the same crops, noise and noise levels, with another prompt. So a step's
    random numbers do not depend on it.

    Args:
        plan: the run's plan.
        prior: how the class is preserved.
    """

    def __init__(self, plan: Plan, prior: PriorOption):
        self.plan, self.prior = plan, prior
        self.batch_size, self._each = plan.batch_size, 2 if prior.second_pass else 1
        self.accumulation = plan.accumulation * self._each

    def count(self, step: int) -> int:
        """How many passes of a step contain samples in at least one process."""
        return self.plan.micros(step) * self._each

    def micro_batch(self, step: int, micro: int, process: int = 0) -> list[Draw]:
        """The draws of one pass."""
        draws = self.plan.micro_batch(step, micro // self._each, process)
        if self.is_second(micro):
            draws = [replace(draw, caption=self.prior.class_prompt(draw.caption)) for draw in draws]
        return draws

    def is_second(self, micro: int) -> bool:
        """Whether a pass is the second one of its micro-batch."""
        return micro % self._each == 1

    def shares(self, draws: Sequence[Draw], second: bool) -> tuple[Tensor, Tensor]:  # [b, 1, 1, 1] each
        """The factors of draws in the loss against their targets, and in that against the base's predictions.

        The base's predictions are the targets of a second pass and of sources for regularization. A second pass leaves
        the latter out, for they have had their prompt.
        """
        of_class = [self.plan.sources[draw.view.picture.source].regularization for draw in draws]
        predicted = [self.prior.predicts and each != second for each in of_class]
        learned = [float(not second and not each) for each in predicted]
        return _column(learned), _column([self.prior.factor * each for each in predicted])


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)
