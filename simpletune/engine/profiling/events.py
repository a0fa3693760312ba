"""Convert the profiler's events to plain records. Times are in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent

STEP = "ProfilerStep#"

Interval = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """An event with a duration."""

    name: str
    start: int
    stop: int
    track: int
    """The thread; on the device, the stream."""
    id: int = 0
    """An operation's number; for device work, the number of the operation that launched it; 0: unknown."""


@dataclass(frozen=True)
class Recording:
    """The events of a window."""

    ranges: list[Span] = field(default_factory=list)
    """Ranges named by the program: steps, phases, blocks."""
    operators: list[Span] = field(default_factory=list)
    """Operations on the host, including calls of the device's runtime."""
    device: list[Span] = field(default_factory=list)
    """Kernels, copies and fills on the device."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(time, change in bytes) of the device's memory, or without a device, of the host's."""

    @property
    def steps(self) -> list[Span]:
        """The recorded steps."""
        return sorted((span for span in self.ranges if span.name.startswith(STEP)), key=lambda span: span.start)

    def whole_steps(self, count: int) -> list[Span]:
        """Return the first ``count`` recorded steps, without a truncated one after them.

        Raises:
            ValueError: no step was recorded.
        """
        steps = self.steps[:count]
        if not steps:
            raise ValueError("the profiler recorded no step")
        return steps


def is_python(event: _KinetoEvent) -> bool:
    """Whether an event is a call of a Python function. torch 2.11 lists none and has no such method."""
    return hasattr(event, "is_python_function") and event.is_python_function()


def read_events(events: Iterable[_KinetoEvent]) -> Recording:
    """Sort the profiler's events into a recording.

    Args:
        events: kineto events of ``torch.profiler``.
    """
    recording = Recording()
    on_host: list[tuple[int, int]] = []
    on_device: list[tuple[int, int]] = []
    for event in events:
        is_host = event.device_type().name == "CPU"
        if event.name() == "[memory]":
            (on_host if is_host else on_device).append((event.start_ns(), event.nbytes()))  # type: ignore[attr-defined]  # torch's stub lacks it
            continue
        if is_python(event) or event.is_async():
            continue
        track, stop = event.device_resource_id(), event.start_ns() + event.duration_ns()
        if not is_host:
            if not event.is_user_annotation():
                launch = event.linked_correlation_id()
                recording.device.append(Span(event.name(), event.start_ns(), stop, track, launch))
            continue
        own = 0 if event.linked_correlation_id() else event.correlation_id()
        span = Span(event.name(), event.start_ns(), stop, event.start_thread_id(), own)
        (recording.ranges if event.is_user_annotation() else recording.operators).append(span)
    recording.memory.extend(on_device or on_host)
    return recording


def union(spans: Iterable[Span]) -> list[Interval]:
    """Merge spans into disjoint intervals, in order."""
    stretches: list[Interval] = []
    for start, stop in sorted((span.start, span.stop) for span in spans):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(stop, stretches[-1][1])
        else:
            stretches.append((start, stop))
    return stretches


def gaps(busy: Sequence[Interval], start: int, stop: int) -> Iterator[Interval]:
    """Yield the gaps between busy intervals, from start to stop."""
    for begin, end in busy:
        if begin > start:
            yield start, min(begin, stop)
        start = max(start, end)
        if start >= stop:
            return
    yield start, stop


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    """Sum the overlap of two lists of ordered, disjoint intervals."""
    total, i, j = 0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def self_times(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each span with its time minus that of the spans directly inside it, per thread."""
    open_spans: list[tuple[Span, int]] = []
    for span in sorted(spans, key=lambda span: (span.track, span.start, -span.stop)):
        while open_spans and (open_spans[-1][0].track != span.track or open_spans[-1][0].stop <= span.start):
            yield open_spans.pop()
        if open_spans:
            outer, left = open_spans[-1]
            open_spans[-1] = outer, left - (min(span.stop, outer.stop) - span.start)
        open_spans.append((span, span.stop - span.start))
    yield from reversed(open_spans)
