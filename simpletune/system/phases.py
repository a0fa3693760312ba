"""Name the phases of a step for the profiler and for memory accounting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_BEFORE, _AFTER = "## ", " ##"  # distinguish phases from other profiler ranges


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record a named range: data, noise, forward, loss, backward, clip or optimizer. A nested phase counts as itself,
    not as the outer one."""
    from torch.profiler import record_function

    with record_function(range_name(name)):
        yield


def range_name(name: str) -> str:
    """Return the profiler's range name of a phase."""
    return f"{_BEFORE}{name}{_AFTER}"


def phase_name(range_name: str) -> str | None:
    """Return the phase of a profiler range; None for other ranges, such as torch's ``Optimizer.step``."""
    if range_name.startswith(_BEFORE) and range_name.endswith(_AFTER):
        return range_name[len(_BEFORE) : -len(_AFTER)]
    return None
