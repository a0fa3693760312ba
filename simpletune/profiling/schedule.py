"""Which epochs are traced, and which of an epoch's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpletune.profiling.option import Profile


def evenly_spaced(epochs: int, traces: int) -> list[int]:
    """Which epochs are traced: evenly spread, the first and the last among them."""
    if traces >= epochs:
        return list(range(epochs))
    if traces <= 1:
        return [0][:traces]
    return [round(number * (epochs - 1) / (traces - 1)) for number in range(traces)]


@dataclass(frozen=True)
class Place:
    """The steps of a window.

    Args:
        start: the first step that the profiler sees.
        warmup: so many of what it sees are thrown away.
        active: so many are recorded.
    """

    start: int
    warmup: int
    active: int


def place_window(option: Profile, first: int, stop: int, interrupted: Callable[[int], bool]) -> Place:
    """Where the window lies in an epoch: as early as there are enough steps in a row, after ``wait`` if it can be.

    Where there are not enough, waiting goes first, then warm-up, then recorded steps.

    Args:
        option: the window that is asked for.
        first: the epoch's first step, or the one that a resumed run starts from.
        stop: the step after the epoch's last.
        interrupted: whether something else (validation, saving) stands between a step and the next.
    """
    wanted = option.warmup + option.active
    best = first, first
    for begin in (first + option.wait, first):
        start = begin
        for step in range(begin, stop):
            if step + 1 - start > best[1] - best[0]:
                best = start, step + 1
            if best[1] - best[0] >= wanted:
                return Place(best[0], option.warmup, option.active)
            if interrupted(step):
                start = step + 1
    steps = best[1] - best[0]
    active = min(option.active, steps)
    return Place(best[0], steps - active, active)
