"""Choose the epochs to trace, and the steps of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpletune.engine.profiling.option import Profile


def traced_epochs(epochs: int, traces: int) -> list[int]:
    """Choose epochs to trace: evenly spread, including the first and the last."""
    if traces >= epochs:
        return list(range(epochs))
    if traces <= 1:
        return [0][:traces]
    return [round(number * (epochs - 1) / (traces - 1)) for number in range(traces)]


@dataclass(frozen=True)
class TraceWindow:
    """The steps of a window.

    Args:
        start: first step that the profiler records.
        warmup: number of recorded steps to discard.
        active: number of recorded steps to keep.
    """

    start: int
    warmup: int
    active: int


def place_window(option: Profile, first: int, stop: int, interrupted: Callable[[int], bool]) -> TraceWindow:
    """Place the window in an epoch: at the first run of enough consecutive steps, after ``wait`` if possible.

    If there are too few steps, give up ``wait`` first, then warm-up, then recorded steps.

    Args:
        option: the requested window.
        first: the epoch's first step, or the first step of a resumed run.
        stop: the step after the epoch's last.
        interrupted: whether something else (validation, saving) runs between a step and the next.
    """
    wanted = option.warmup + option.active
    best = first, first
    for begin in (first + option.wait, first):
        start = begin
        for step in range(begin, stop):
            if step + 1 - start > best[1] - best[0]:
                best = start, step + 1
            if best[1] - best[0] >= wanted:
                return TraceWindow(best[0], option.warmup, option.active)
            if interrupted(step):
                start = step + 1
    steps = best[1] - best[0]
    active = min(option.active, steps)
    return TraceWindow(best[0], steps - active, active)
