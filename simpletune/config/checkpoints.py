"""When a run's state is saved, and which checkpoints stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from simpletune.options import Option, Problem

PATH = "checkpoint.keep_every"


class Checkpoint(Option):
    """When the run's state is saved."""

    every: Annotated[int, Field(ge=1)] | None = 250
    """Steps between checkpoints; null: only at the end. There is always one at the end."""
    keep_last: Annotated[int, Field(ge=1)] | Literal["all"] = 2
    """How many checkpoints stay, the newest ones; all: every one stays."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Checkpoints of every so many steps stay for good, beside the last ones; a multiple of every. null: none."""

    def kept(self, steps: Sequence[int]) -> list[int]:
        """Which checkpoints stay.

        Args:
            steps: of all that there are, in order.
        """
        if self.keep_last == "all":
            return list(steps)
        oldest = len(steps) - self.keep_last
        return [step for place, step in enumerate(steps) if place >= oldest or self._is_for_good(step)]

    def _is_for_good(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0

    def most_at_once(self, steps: Sequence[int]) -> int:
        """How many checkpoints there are at most at a time: a new one is whole before an old one goes.

        Args:
            steps: after which the run saves, in order.
        """
        if not steps:
            return 0
        return 1 + len(self.kept(steps[:-1]))

    def in_words(self) -> str:
        """Which checkpoints stay, in words."""
        if self.keep_last == "all":
            return "all stay"
        for_good = f", and those of every {self.keep_every} steps" if self.keep_every is not None else ""
        return f"the last {self.keep_last}{for_good} stay"

    def rules(self) -> Iterator[Problem]:
        """What cannot be kept because it is never saved."""
        if self.keep_every is None:
            return
        if self.every is None:
            yield Problem(PATH, f"{self.keep_every} needs checkpoints to keep. Set checkpoint.every to a divisor of it")
        elif self.keep_every % self.every:
            near = max(1, round(self.keep_every / self.every)) * self.every
            yield Problem(
                PATH,
                f"{self.keep_every} is not a multiple of checkpoint.every, {self.every}: only saved steps can be kept. "
                f"Use {near}",
            )
