"""The named ranges of a step: the profiler records them, and the memory accounting counts by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_BEFORE, _AFTER = "## ", " ##"  # around a phase's name: they tell it from other ranges of the profiler


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A named range in the trace: data, noise, forward, loss, backward, clip, optimizer. One inside another counts as
    itself, not as the one around it."""
    from torch.profiler import record_function

    with record_function(range_name(name)):
        yield


def range_name(name: str) -> str:
    """What the profiler calls the range of a phase."""
    return f"{_BEFORE}{name}{_AFTER}"


def phase_name(range_name: str) -> str | None:
    """The phase that a range of the profiler marks; None: another range, such as torch's ``Optimizer.step``."""
    if range_name.startswith(_BEFORE) and range_name.endswith(_AFTER):
        return range_name[len(_BEFORE) : -len(_AFTER)]
    return None
