"""Decide when a run saves checkpoints and which ones it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option, Problem

PATH = "checkpoint.keep_every"


class Checkpoint(Option):
    """Save the state of the run."""

    every: Annotated[int, Field(ge=1)] | None = 250
    """Steps between checkpoints; null: save only at the end. A run always saves at its end."""
    keep_last: Annotated[int, Field(ge=1)] | Literal["all"] = 2
    """Number of newest checkpoints to keep, or all."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep every checkpoint whose step is a multiple of this number, which must be a multiple of checkpoint.every.
    null: keep only the newest."""

    def kept(self, steps: Sequence[int]) -> list[int]:
        """Choose the checkpoints to keep.

        Args:
            steps: steps of all checkpoints, in ascending order.
        """
        if self.keep_last == "all":
            return list(steps)
        oldest = len(steps) - self.keep_last
        return [step for place, step in enumerate(steps) if place >= oldest or self._is_for_good(step)]

    def _is_for_good(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0

    def most_at_once(self, steps: Sequence[int], best: bool = False) -> int:
        """Return the maximum number of checkpoints on disk: a new one is complete before an old one is removed.

        Args:
            steps: steps after which the run saves, in ascending order.
            best: whether the best checkpoint so far stays, too.
        """
        if not steps:
            return 0
        kept = len(self.kept(steps[:-1]))
        return 1 + kept + (best and kept < len(steps) - 1)

    def in_words(self) -> str:
        """Describe which checkpoints are kept."""
        if self.keep_last == "all":
            return "keeps all"
        for_good = f" and one every {self.keep_every} steps" if self.keep_every is not None else ""
        return f"keeps the best and the last {self.keep_last}{for_good}"

    def rules(self) -> Iterator[Problem]:
        """Refuse to keep checkpoints that are never saved."""
        if self.keep_every is None:
            return
        if self.every is None:
            yield Problem(PATH, f"{self.keep_every} needs saved checkpoints. Set checkpoint.every to a divisor of it")
        elif self.keep_every % self.every:
            near = max(1, round(self.keep_every / self.every)) * self.every
            yield Problem(
                PATH,
                f"{self.keep_every} is not a multiple of checkpoint.every, {self.every}, so those steps are not saved. "
                f"Use {near}",
            )
