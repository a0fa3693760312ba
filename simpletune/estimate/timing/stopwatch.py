"""Time operations on a device, without the host's overhead and without the effect of other programs.

On CUDA a short operation is captured many times into a graph and replayed, because launching it one by one takes longer
than running it. On a CPU each timing is bracketed by two of a fixed reference load: other programs slow both down
alike, so the ratio stays the same. With one thread, time in which the system ran something else does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

Call = Callable[[], object]
LONG = 100e-6  # seconds; a longer operation needs no graph
ENOUGH = 2e-3  # seconds to time at once
MOST = 400  # repetitions
BEST_OF = 3
SAMPLES = 3
REFERENCES = 4
QUEUED = 10  # calls to queue without waiting


class CpuStopwatch:
    """A stopwatch for operations on the CPU, with operands outside of a core's caches, as in a step."""

    device = torch.device("cpu")
    beyond_caches, most_copies = 2**24, 256
    """The total bytes of operands at which they displace each other from the caches, and the most copies."""

    def __init__(self, reference: Call | None = None):
        self._reference = reference or reference_load()
        self.reference_seconds = statistics.median(self.load_seconds() for _ in range(20))
        """Seconds of the reference load, to which all timings are relative."""

    def device_seconds(self, calls: Sequence[Call], what: str = "") -> float:
        """Measure the seconds per call on alternating operands, as in a step. Keeps the results, which would otherwise
        all be written to the same memory."""
        kept = [call() for call in calls]

        def several() -> None:
            for _ in range(rounds):
                for number, call in enumerate(calls):
                    kept[number] = call()

        rounds = 1
        rounds = max(1, int(ENOUGH / cpu_seconds(several)))
        return self._quiet_median(lambda: cpu_seconds(several)) / (rounds * len(calls))

    def host_seconds(self, call: Call) -> float:
        """Measure the seconds per call, repeated without pause."""
        call()
        repeats = min(MOST, max(1, int(ENOUGH / cpu_seconds(call))))

        return self._quiet_median(lambda: cpu_seconds(lambda: [call() for _ in range(repeats)])) / repeats

    def _quiet_median(self, measured: Callable[[], float]) -> float:
        """Return the median of measurements relative to the reference load around them, converted to seconds."""
        return statistics.median(self.ratios(measured, SAMPLES)) * self.reference_seconds

    def ratios(self, measured: Callable[[], float], samples: int) -> list[float]:
        """Measure several times, each divided by the reference load before and after it."""
        found, before = [], self.load_seconds()
        for _ in range(samples):
            seconds, after = measured(), self.load_seconds()
            found.append(2 * seconds / (before + after))
            before = after
        return found

    def load_seconds(self) -> float:
        """Measure the reference load's current seconds, with its operands in the caches."""
        for _ in range(REFERENCES):
            self._reference()
        return statistics.median(cpu_seconds(self._reference) for _ in range(REFERENCES))


class CudaStopwatch:
    """A stopwatch for operations on a CUDA device."""

    beyond_caches, most_copies = 2**26, 16

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.graphs_failed: dict[str, str] = {}
        """Why no graph could be captured, by kind of operation; times of short operations then include their launch."""

    def device_seconds(self, calls: Sequence[Call], what: str = "") -> float:
        """Measure the seconds per call on alternating operands, without gaps."""
        for call in calls[:2]:
            call()
        turns = cycle(calls)
        once = self._between_events(lambda: next(turns)(), 3)
        repeats = min(MOST, max(8, int(ENOUGH / 4 / once))) if once < LONG else min(MOST, max(1, int(ENOUGH / once)))
        if once < LONG and what not in self.graphs_failed:
            replay = self._capture([next(turns) for _ in range(repeats)], what)
            if replay is not None:
                replay()
                return min(self._between_events(replay, 1) for _ in range(BEST_OF)) / repeats
        return min(self._between_events(lambda: next(turns)(), repeats) for _ in range(BEST_OF))

    def host_seconds(self, call: Call) -> float:
        """Measure the seconds until a call returns, over fewer calls than the device's queue holds."""
        call()
        found = []
        for _ in range(BEST_OF):
            torch.cuda.synchronize(self.device)
            clock = time.perf_counter()
            for _ in range(QUEUED):
                call()
            found.append((time.perf_counter() - clock) / QUEUED)
            torch.cuda.synchronize(self.device)
        return min(found)

    def _between_events(self, call: Call, repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return max(begin.elapsed_time(end) / 1e3 / repeats, 1e-7)

    def _capture(self, calls: Sequence[Call], what: str) -> Call | None:
        """Capture calls in a graph; None if this device cannot."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for call in calls:
                        call()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.graphs_failed[what] = str(error).splitlines()[0]
            torch.cuda.synchronize(self.device)
            return None
        return graph.replay


def reference_load() -> Call:
    """Make a fixed load of about a millisecond: products, and traffic beyond a core's caches."""
    a, b = torch.full((256, 256), 0.5), torch.full((256, 256), 0.25)
    c, d = torch.full((2**18,), 0.5), torch.full((2**18,), 0.25)

    def load() -> None:
        torch.mm(a, b)
        torch.mm(b, a)
        torch.add(c, d)

    return load


Stopwatch = CpuStopwatch | CudaStopwatch


def cpu_seconds(call: Call) -> float:
    """Measure the seconds of a call on the CPU; with a single thread, only the time that the thread ran."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    call()
    return clock() - began
