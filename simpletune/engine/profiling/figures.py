"""What a window's events say: seconds by phase, idle time, the most expensive operators, shares by kind of work.

The events are read as they are: ``key_averages`` knows no gaps and no work that a range launched, drops the calls of
an operator inside its namesake, and makes 2.8 KB of each event, which takes five times as long. Times in nanoseconds.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simpletune.system.options import Json
from simpletune.system.phases import AFTER, BEFORE, phase_name

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent

STEP = "ProfilerStep#"
TOP = 20
OTHER = "other"
Interval = tuple[int, int]
Chain = tuple[str, ...]

# Kinds of work.
AUTOENCODER, OPTIMIZER, ATTENTION = "autoencoder", "optimizer", "attention"
LINEARS, QUANTISATION, ELEMENT_WISE, IDLE = "linears", "quantisation", "element-wise", "idle"
KINDS = (ATTENTION, LINEARS, ELEMENT_WISE, QUANTISATION, OPTIMIZER, AUTOENCODER, IDLE)
# Patterns for the names around an operation, outermost first, tested in this order; PRODUCT tests the last two names.
AROUND = {
    AUTOENCODER: re.compile(rf"^{AUTOENCODER}$"),
    OPTIMIZER: re.compile(rf"^Optimizer\.step#|^{BEFORE}optimizer{AFTER}$"),
    ATTENTION: re.compile(r"attention|softmax|::bmm|::baddbmm", re.IGNORECASE),
}
PRODUCT = re.compile(r"::(addmm_?|mm|_int_mm|linear|mkldnn_linear|matmul)$|conv|gemm|matmul|_mm(_|$)|int8_product")
QUANTISING = re.compile(r"int8|nf4|quanti|quanto|bitsandbytes|4bit|blockwise", re.IGNORECASE)


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

    def whole_steps(self, count: int) -> list[Span]:
        """Return the first ``count`` recorded steps, without a truncated one after them. Raises ValueError if there is
        none."""
        found = sorted((span for span in self.ranges if span.name.startswith(STEP)), key=lambda span: span.start)
        if not (steps := found[:count]):
            raise ValueError("the profiler recorded no step")
        return steps


def read_events(events: Iterable[_KinetoEvent]) -> Recording:
    """Sort ``torch.profiler``'s events into a recording."""
    recording = Recording()
    on_host: list[tuple[int, int]] = []
    on_device: list[tuple[int, int]] = []
    for event in events:
        is_host = event.device_type().name == "CPU"
        if event.name() == "[memory]":
            (on_host if is_host else on_device).append((event.start_ns(), event.nbytes()))  # type: ignore[attr-defined]  # torch's stub lacks it
            continue
        if event.is_async() or event.is_python_function():
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


def nested(spans: Iterable[Span]) -> Iterator[tuple[Span, Chain, int]]:
    """Yield each span with the names around it and its own, and its time minus that of the spans directly inside it,
    per thread."""
    stack: list[tuple[Span, Chain, int]] = []
    for span in sorted(spans, key=lambda span: (span.track, span.start, -span.stop)):
        while stack and (stack[-1][0].track != span.track or stack[-1][0].stop <= span.start):
            yield stack.pop()
        around: Chain = ()
        if stack:
            outer, around, left = stack[-1]
            stack[-1] = outer, around, left - (min(span.stop, outer.stop) - span.start)
        stack.append((span, (*around, span.name), span.stop - span.start))
    yield from reversed(stack)


def figures(recording: Recording, count: int) -> Json:
    """Compute figures per recorded step.

    Without a device, a phase's time is its range minus nested phases. With a device, it runs from the end of the
    preceding device work to the end of the last work that the phase launched. ``count`` complete steps are counted.
    """
    steps = recording.whole_steps(count)
    start, stop = steps[0].start, steps[-1].stop
    ranges = [span for span in recording.ranges if phase_name(span.name) is not None and start <= span.start < stop]
    operators = [span for span in recording.operators if start <= span.start < stop]
    waits = union(span for span in ranges if phase_name(span.name) == "data")
    busy = union(recording.device)
    if busy:
        seconds = device_phases(recording, ranges, start)
        idle = list(gaps(busy, start, stop))
        for_data = overlap(idle, waits)
        for_host = sum(b - a for a, b in idle) - for_data
    else:
        seconds = Counter()
        for span in sorted(ranges, key=lambda span: span.start):  # phases in order of their first occurrence
            seconds.setdefault(str(phase_name(span.name)), 0)
        for span, _, own in nested(ranges):
            seconds[str(phase_name(span.name))] += own
        for_data, for_host = sum(b - a for a, b in waits), 0
    count, whole = len(steps), stop - start

    def per_step(nanoseconds: int) -> float:
        return round(nanoseconds / count / 1e9, 9)

    seconds[OTHER] += max(0, whole - sum(seconds.values()))
    return {
        "steps": count,
        "seconds_per_step": per_step(whole),
        "phases": {name: per_step(taken) for name, taken in seconds.items()},
        "idle": {"data": per_step(for_data), "host": per_step(for_host)},
        "operators": top(((span, own) for span, _, own in nested(operators)), count),
        "kernels": top(((span, span.stop - span.start) for span in recording.device), count),
    }


def device_phases(recording: Recording, ranges: Sequence[Span], start: int) -> Counter[str]:
    """Sum nanoseconds by phase from the work that each launched on the device."""
    launched = {span.id: span.start for span in recording.operators if span.id}
    taken: Counter[str] = Counter()
    before, name = start, OTHER
    phase_at = innermost_phase(ranges)
    for span in sorted(recording.device, key=lambda span: (span.start, span.stop)):
        if span.id in launched:  # work of unknown origin counts to the phase of the preceding work
            name = phase_at(launched[span.id])
        taken[name] += max(0, span.stop - before)
        before = max(before, span.stop)
    return taken


def innermost_phase(ranges: Iterable[Span]) -> Callable[[int], str]:
    """Return a look-up of the innermost phase at a time (between phases, ``other``) in nested or disjoint ranges."""
    times, names = [0], [OTHER]
    inside: list[Span] = []
    for span in [*sorted(ranges, key=lambda span: (span.start, -span.stop)), None]:
        while inside and (span is None or inside[-1].stop <= span.start):
            times.append(inside.pop().stop)
            names.append(str(phase_name(inside[-1].name)) if inside else OTHER)
        if span is not None:
            inside.append(span)
            times.append(span.start)
            names.append(str(phase_name(span.name)))
    return lambda time: names[bisect_right(times, time) - 1]


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
    phase_at = innermost_phase(span for span in recording.ranges if phase_name(span.name) is not None)
    return most, phase_at(when)


def shares(recording: Recording, count: int) -> dict[str, float]:
    """Compute shares of the recorded steps' time by kind; they add up to 1.

    With a device, count device time; a kernel has the kind of the operation that launched it. Without a device, count
    the operations' own time on the host; ``idle`` is then the time of Python and autograd between them. ``count``: of
    the complete steps.
    """
    steps = recording.whole_steps(count)
    start, stop = steps[0].start, steps[-1].stop
    taken: Counter[str] = Counter()
    timed = list(nested([*recording.ranges, *recording.operators]))
    if recording.device:
        launched = {span.id: chain for span, chain, _ in timed if span.id}
        for span in recording.device:
            if start <= span.start < stop:
                taken[operation_kind((*launched.get(span.id, ()), span.name))] += span.stop - span.start
        idle = sum(b - a for a, b in gaps(union(recording.device), start, stop))
    else:
        for span, chain, own in timed:
            # not ranges, autograd's nodes and Python's functions
            is_work = "::" in span.name and not span.name.startswith("autograd::")
            if start <= span.start < stop and is_work:
                taken[operation_kind(chain)] += own
        idle = max(0, stop - start - sum(taken.values()))
    busy = (stop - start - idle) / (sum(taken.values()) or 1)  # several streams or threads may work at once
    taken = Counter({kind: round(each * busy) for kind, each in taken.items()})
    return {kind: round((idle if kind == IDLE else taken[kind]) / (stop - start), 4) for kind in KINDS}


def operation_kind(chain: Chain) -> str:
    """Classify the operation at the end of a chain of nested names."""
    for kind, pattern in AROUND.items():
        if any(pattern.search(name) for name in chain):
            return kind
    if any(PRODUCT.search(name) for name in chain[-2:]):
        return LINEARS
    return QUANTISATION if any(QUANTISING.search(name) for name in chain) else ELEMENT_WISE
