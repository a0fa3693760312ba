"""Name the phases of a step for the profiler and for memory accounting."""

from __future__ import annotations

from contextlib import AbstractContextManager

BEFORE, AFTER = "## ", " ##"  # distinguish phases from other profiler ranges


def phase(name: str) -> AbstractContextManager[object]:
    """Record a named range: data, noise, forward, loss, backward, clip or optimizer. A nested phase counts as itself,
    not as the outer one."""
    from torch.profiler import record_function

    return record_function(f"{BEFORE}{name}{AFTER}")


def phase_name(range_name: str) -> str | None:
    """Return the phase of a profiler range; None for other ranges, such as torch's ``Optimizer.step``."""
    if range_name.startswith(BEFORE) and range_name.endswith(AFTER):
        return range_name[len(BEFORE) : -len(AFTER)]
    return None
