"""Learning-rate schedules: the union ``Schedule``, discriminated by ``schedule.name``; pure functions of the step."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option


class _Schedule(Option):
    """Warm-up, followed by a decay over the rest of the run, which members define."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly: step s of w has (s + 1) / (w + 1) of it, so that the first one
    learns, too. transformers and the trainers that use it take s / w, which is one step behind."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate in a step, counted from 0, of a run of ``steps``."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        rest = max(1, steps - self.warmup_steps)
        return self.decay(min(1.0, (step - self.warmup_steps) / rest))

    def decay(self, progress: float) -> float:
        """Return the factor at a fraction (0 to 1) of the run after warm-up."""
        return 1.0


class Constant(_Schedule):
    """Constant learning rate."""

    name: Literal["constant"] = "constant"
    """Constant learning rate."""


class Linear(_Schedule):
    """Linear decay to zero."""

    name: Literal["linear"] = "linear"
    """Linear decay to zero."""

    def decay(self, progress: float) -> float:
        return 1.0 - progress


class Cosine(_Schedule):
    """Cosine decay to zero (arXiv:1608.03983)."""

    name: Literal["cosine"] = "cosine"
    """Cosine decay to zero."""

    def decay(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class Polynomial(_Schedule):
    """Polynomial decay to a fraction of the learning rate."""

    name: Literal["polynomial"] = "polynomial"
    """Polynomial decay to a fraction of the learning rate."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the decay, applied to the remaining fraction of the run."""
    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a fraction of lr."""

    def decay(self, progress: float) -> float:
        return self.end + (1.0 - self.end) * (1.0 - progress) ** self.power


class CosineWithRestarts(_Schedule):
    """Several cosine decays to zero, one after another (arXiv:1608.03983)."""

    name: Literal["cosine_with_restarts"] = "cosine_with_restarts"
    """Cosine decays to zero, each followed by a restart at the full learning rate (hard restarts)."""
    cycles: Annotated[int, Field(ge=1)] = 3
    """Number of decays in the run, all of one length; 1 equals cosine."""

    def decay(self, progress: float) -> float:
        # 1e-9: float64 may round to just below a restart, where a step would have a learning rate of 0
        cycle = (self.cycles * progress + 1e-9) % 1.0
        return 0.5 * (1.0 + math.cos(math.pi * cycle))


class Rex(_Schedule):
    """REX, the reflected exponential (arXiv:2107.04197): slow at first, fast at the end."""

    name: Literal["rex"] = "rex"
    """REX: decay to zero that stays high for long and falls fast at the end."""

    def decay(self, progress: float) -> float:
        return (1.0 - progress) / (0.5 + 0.5 * (1.0 - progress))


Schedule = Annotated[Constant | Linear | Cosine | Polynomial | CosineWithRestarts | Rex, Field(discriminator="name")]
