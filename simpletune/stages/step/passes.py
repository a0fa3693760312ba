"""The passes of a step: a plan's micro-batches, and, with a second pass, each again with the class prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from simpletune.config.prior import PriorOption
from simpletune.data.plan import Plan
from simpletune.data.samples import SampleDraw
from simpletune.stages.step.assignment import RankMicroBatches

WHOLE = RankMicroBatches()


class TrainingPasses:
    """Selects the draws of each pass of one process, and their targets.

    A second pass follows its micro-batch with the same crops, noise and noise levels, and another prompt. So a step's
    random numbers do not depend on it.

    Args:
        plan: the run's plan.
        prior: how the class is preserved.
        share: which micro-batches of a step the process computes.
    """

    def __init__(self, plan: Plan, prior: PriorOption, share: RankMicroBatches = WHOLE):
        self.plan, self.prior, self.share = plan, prior, share
        self.batch_size, self._each = plan.batch_size, 2 if prior.second_pass else 1
        self.accumulation = -(-plan.accumulation // share.processes) * self._each
        """The largest number of passes in a step."""
        self.places = lru_cache(maxsize=128)(self._places)

    def _places(self, step: int) -> list[int]:
        """The micro-batches of a step that this process computes, in their order; if there is none, one made of
        fillers, because the processes exchange gradients."""
        count = self.plan.micros(step)
        if self.share.is_whole:
            return list(range(count))
        return self.share.of(self.plan.areas(step)) or [count]

    def count(self, step: int) -> int:
        """How many passes this process computes in a step."""
        return len(self.places(step)) * self._each

    def place(self, step: int, micro: int) -> int:
        """The number of a pass among all processes' passes; beyond the last one, a pass of fillers."""
        places = self.places(step)
        own = micro // self._each
        place = places[own] if own < len(places) else self.plan.micros(step)
        return place * self._each + micro % self._each

    def micro_batch(self, step: int, micro: int) -> list[SampleDraw]:
        """The draws of one pass."""
        draws = self.plan.micro_batch(step, self.place(step, micro) // self._each)
        if self.is_second(micro):
            draws = [replace(draw, caption=self.prior.class_prompt(draw.caption)) for draw in draws]
        return draws

    def micro_batches(self, step: int) -> list[list[SampleDraw]]:
        """The draws of this process's micro-batches in a step, each once."""
        return [self.plan.micro_batch(step, place) for place in self.places(step)]

    def is_second(self, micro: int) -> bool:
        """Whether a pass is the second one of its micro-batch."""
        return micro % self._each == 1

    def shares(self, draws: Sequence[SampleDraw], second: bool) -> tuple[Tensor, Tensor]:  # [b, 1, 1, 1] each
        """The draws' factors in the loss against their targets, and in the loss against the base's predictions.

        The base's predictions are the targets of a second pass and of regularization sources. A second pass skips the
        latter, which have already had their prompt.
        """
        of_class = [self.plan.sources[draw.view.picture.source].regularization for draw in draws]
        predicted = [self.prior.predicts and each != second for each in of_class]
        learned = [float(not second and not each) for each in predicted]
        return _column(learned), _column([self.prior.factor * each for each in predicted])


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)
