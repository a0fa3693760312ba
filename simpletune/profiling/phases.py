"""The named ranges of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MARKS = "## ", " ##"  # around the names of a step's phases, which tell them from other ranges


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A named range in the trace: data, noise, forward, loss, backward, clip, optimizer. One inside another counts as
    itself, not as the one around it."""
    from torch.profiler import record_function

    with record_function(f"{MARKS[0]}{name}{MARKS[1]}"):
        yield


def phase_of(mark: str) -> str | None:
    """The phase that a range of that name is; None: another range."""
    if mark.startswith(MARKS[0]) and mark.endswith(MARKS[1]):
        return mark[len(MARKS[0]) : -len(MARKS[1])]
    return None
