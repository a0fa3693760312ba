"""Learning-rate schedules: the union of ``schedule.name``. Each is a pure function of the step."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from simpletune.options import Option


class _Schedule(Option):
    """Warm-up, then a decay that members define over the rest of the run."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0 in a line."""

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by.

        Args:
            step: counts from 0.
            steps: steps of the whole run.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        rest = max(1, steps - self.warmup_steps)
        return self.decay(min(1.0, (step - self.warmup_steps) / rest))

    def decay(self, progress: float) -> float:
        """The factor at a share of the run after warm-up, 0 to 1."""
        raise NotImplementedError


class Constant(_Schedule):
    """The same learning rate throughout."""

    name: Literal["constant"] = "constant"
    """The same learning rate throughout."""

    def decay(self, progress: float) -> float:
        """1."""
        return 1.0


class Linear(_Schedule):
    """Down to zero in a line."""

    name: Literal["linear"] = "linear"
    """Down to zero in a line."""

    def decay(self, progress: float) -> float:
        """1 - progress."""
        return 1.0 - progress


class Cosine(_Schedule):
    """Down to zero along half a cosine (arXiv:1608.03983)."""

    name: Literal["cosine"] = "cosine"
    """Down to zero along half a cosine."""

    def decay(self, progress: float) -> float:
        """(1 + cos(pi progress)) / 2."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class Polynomial(_Schedule):
    """Down to a share of the learning rate along a power."""

    name: Literal["polynomial"] = "polynomial"
    """Down to a share of the learning rate along a power."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the remaining share of the run."""
    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left at the end."""

    def decay(self, progress: float) -> float:
        """end + (1 - end) (1 - progress)^power."""
        return self.end + (1.0 - self.end) * (1.0 - progress) ** self.power


Schedule = Annotated[Constant | Linear | Cosine | Polynomial, Field(discriminator="name")]
