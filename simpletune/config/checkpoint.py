"""The section ``checkpoint``: when a run saves, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option, Problem


class Checkpoint(Option):
    """Save the state of the run."""

    every: Annotated[int, Field(ge=1)] | None = 250
    """Steps between checkpoints; null: save only at the end. A run always saves at its end."""
    keep_last: Annotated[int, Field(ge=1)] | Literal["all"] = 2
    """Number of newest checkpoints to keep, or all."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep every checkpoint whose step is a multiple of this number, which must be a multiple of checkpoint.every.
    null: keep only the newest."""

    def steps_to_keep(self, steps: Sequence[int]) -> list[int]:
        """Choose the checkpoints to keep among those of these ascending steps."""
        if self.keep_last == "all":
            return list(steps)
        newest, every = steps[-self.keep_last :], self.keep_every
        return [step for step in steps if step in newest or (every is not None and step % every == 0)]

    def most_on_disk(self, steps: Sequence[int], best: bool = False) -> int:
        """Count the checkpoints on disk at most, saved after these ascending steps; ``best``: the best so far stays,
        too."""
        if not steps:
            return 0
        kept = len(self.steps_to_keep(steps[:-1]))  # a new one is complete before an old one is removed
        return 1 + kept + (best and kept < len(steps) - 1)

    def describe(self) -> str:
        """Describe which checkpoints are kept."""
        if self.keep_last == "all":
            return "keeps all"
        for_good = f" and one every {self.keep_every} steps" if self.keep_every is not None else ""
        return f"keeps the last {self.keep_last}{for_good}, and the best or the lowest validation loss"

    def rules(self) -> Iterator[Problem]:
        """Refuse to keep checkpoints that are never saved."""
        if self.keep_every is None:
            return
        if self.every is None:
            yield Problem(
                "checkpoint.keep_every",
                f"{self.keep_every} needs saved checkpoints. Set checkpoint.every to a divisor of it",
            )
        elif self.keep_every % self.every:
            near = max(1, round(self.keep_every / self.every)) * self.every
            yield Problem(
                "checkpoint.keep_every",
                f"{self.keep_every} is not a multiple of checkpoint.every, {self.every}, so those steps are not saved. "
                f"Use {near}",
            )
