"""Aggregate a window's events: seconds by phase, idle time, the most expensive operators and kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from simpletune.engine.profiling.events import Recording, Span, gaps, overlap, self_times, union
from simpletune.system.options import Json
from simpletune.system.phases import phase_name

TOP = 20
OTHER = "other"


def figures(recording: Recording, count: int) -> Json:
    """Compute figures per recorded step.

    Without a device, a phase's time is its range minus nested phases. With a device, it runs from the end of the
    preceding device work to the end of the last work that the phase launched.

    Args:
        recording: the events.
        count: number of complete steps; a truncated one may follow.

    Raises:
        ValueError: no step was recorded.
    """
    steps = recording.whole_steps(count)
    start, stop = steps[0].start, steps[-1].stop
    ranges = [span for span in recording.ranges if phase_name(span.name) is not None and start <= span.start < stop]
    waits = union(span for span in ranges if phase_name(span.name) == "data")
    busy = union(recording.device)
    if busy:
        seconds = device_phases(recording, ranges, start)
        idle = list(gaps(busy, start, stop))
        for_data = overlap(idle, waits)
        for_host = sum(b - a for a, b in idle) - for_data
    else:
        seconds = host_phases(ranges)
        for_data, for_host = sum(b - a for a, b in waits), 0
    count, whole = len(steps), stop - start
    seconds[OTHER] += max(0, whole - sum(seconds.values()))
    return {
        "steps": count,
        "seconds_per_step": _seconds(whole, count),
        "phases": {name: _seconds(taken, count) for name, taken in seconds.items()},
        "idle": {"data": _seconds(for_data, count), "host": _seconds(for_host, count)},
        "operators": top(self_times(_within(recording.operators, start, stop)), count),
        "kernels": top(((span, span.stop - span.start) for span in recording.device), count),
    }


def host_phases(ranges: Sequence[Span]) -> Counter[str]:
    """Sum nanoseconds by phase from the ranges alone, in order of first occurrence."""
    taken: Counter[str] = Counter()
    for span in sorted(ranges, key=lambda span: span.start):
        taken.setdefault(str(phase_name(span.name)), 0)
    for span, own in self_times(ranges):
        taken[str(phase_name(span.name))] += own
    return taken


def device_phases(recording: Recording, ranges: Sequence[Span], start: int) -> Counter[str]:
    """Sum nanoseconds by phase from the work that each launched on the device."""
    launched = {span.id: span.start for span in recording.operators if span.id}
    taken: Counter[str] = Counter()
    before, name = start, OTHER
    innermost = Phases(ranges)
    for span in sorted(recording.device, key=lambda span: (span.start, span.stop)):
        if span.id in launched:  # work of unknown origin counts to the phase of the preceding work
            name = innermost.at(launched[span.id])
        taken[name] += max(0, span.stop - before)
        before = max(before, span.stop)
    return taken


class Phases:
    """Look up the innermost phase at a time.

    Args:
        ranges: the ranges of phases; any two are nested or disjoint.
    """

    def __init__(self, ranges: Iterable[Span]):
        self._times, self._names = [0], [OTHER]
        inside: list[Span] = []
        for span in sorted(ranges, key=lambda span: (span.start, -span.stop)):
            self._close(inside, span.start)
            inside.append(span)
            self._change(span.start, inside)
        self._close(inside, None)

    def at(self, time: int) -> str:
        """Return the phase at a time; between phases, ``other``."""
        return self._names[bisect_right(self._times, time) - 1]

    def _close(self, inside: list[Span], until: int | None) -> None:
        while inside and (until is None or inside[-1].stop <= until):
            stop = inside.pop().stop
            self._change(stop, inside)

    def _change(self, time: int, inside: list[Span]) -> None:
        self._times.append(time)
        self._names.append(str(phase_name(inside[-1].name)) if inside else OTHER)


def top(timed: Iterable[tuple[Span, int]], steps: int) -> list[Json]:
    """List the most expensive names: calls in the window, milliseconds per step, share of the total."""
    total: dict[str, int] = defaultdict(int)
    calls: Counter[str] = Counter()
    for span, own in timed:
        total[span.name] += own
        calls[span.name] += 1
    whole = sum(total.values()) or 1
    names = sorted(total, key=lambda name: (-total[name], name))[:TOP]
    return [
        {
            "name": name,
            "calls": calls[name],
            "self_ms": round(total[name] / steps / 1e6, 6),
            "share": round(total[name] / whole, 6),
        }
        for name in names
    ]


def peak_of_memory(recording: Recording) -> tuple[int, str] | None:
    """Return the peak memory relative to the window's start, and its phase; None if memory was not recorded."""
    if not recording.memory:
        return None
    now = most = when = 0
    for time, change in sorted(recording.memory, key=lambda event: event[0]):
        now += change
        if now > most:
            most, when = now, time
    return most, Phases(span for span in recording.ranges if phase_name(span.name) is not None).at(when)


def _within(spans: Iterable[Span], start: int, stop: int) -> Iterable[Span]:
    return (span for span in spans if start <= span.start < stop)


def _seconds(nanoseconds: int, steps: int) -> float:
    return round(nanoseconds / steps / 1e9, 9)
