"""Time an operation on a device: what the device takes, without the host's part, and without other programs' share.

On CUDA a short operation is captured many times into a graph and replayed, because launching it one by one takes longer
than running it. On a CPU each timing stands between two of a fixed reference load: what other programs slow down, they
slow down alike, and the ratio stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]
LONG = 100e-6  # seconds; a longer operation needs no graph
ENOUGH = 2e-3  # seconds to time at once
MOST = 400  # repetitions
BEST_OF = 3
QUEUED = 10  # calls to queue without waiting


class Stopwatch(Protocol):
    """Times operations on one device."""

    device: torch.device

    def device_seconds(self, call: Call, what: str = "") -> float:
        """Seconds that the device takes for one call; ``what`` names the kind of operation."""

    def host_seconds(self, call: Call) -> float:
        """Seconds until one call returns, while the device is not waited for."""

    def wall_seconds(self, call: Call) -> float:
        """Seconds of one call, from a device that has nothing to do to one that has nothing to do again."""


class CpuStopwatch:
    """Times operations on the CPU.

    Args:
        reference: a fixed load; None: the default one.
    """

    device = torch.device("cpu")

    def __init__(self, reference: Call | None = None):
        self._reference = reference or reference_load()
        self._reference()
        self.best = min(_clocked(self._reference) for _ in range(50))
        """Seconds of the reference load at best, to which all timings refer."""

    def device_seconds(self, call: Call, what: str = "") -> float:
        """Seconds of one call, on a machine as quiet as when the reference load took least."""
        call()
        once = _clocked(call)
        repeats = min(MOST, max(1, int(ENOUGH / once)))

        def several() -> None:
            for _ in range(repeats):
                call()

        return min(self.ratio(several) for _ in range(BEST_OF)) * self.best / repeats

    def host_seconds(self, call: Call) -> float:
        """The same: the host computes."""
        return self.device_seconds(call)

    def wall_seconds(self, call: Call) -> float:
        """The same."""
        return self.device_seconds(call)

    def ratio(self, call: Call) -> float:
        """Time a call in units of the reference load before and after it."""
        before, seconds = _clocked(self._reference), _clocked(call)
        return 2 * seconds / (before + _clocked(self._reference))


class CudaStopwatch:
    """Times operations on a CUDA device.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.graphs_failed: dict[str, str] = {}
        """Why no graph could be captured, by kind of operation; short ones then include their launch."""

    def device_seconds(self, call: Call, what: str = "") -> float:
        """Seconds of one call, repeated without gaps."""
        for _ in range(2):
            call()
        once = self._between_events(call, 3)
        if once < LONG and what not in self.graphs_failed:
            repeats = min(MOST, max(8, int(ENOUGH / 4 / once)))
            replay = self._captured(call, repeats, what)
            if replay is not None:
                replay()
                return min(self._between_events(replay, 1) for _ in range(BEST_OF)) / repeats
        repeats = min(MOST, max(1, int(ENOUGH / once)))
        return min(self._between_events(call, repeats) for _ in range(BEST_OF))

    def host_seconds(self, call: Call) -> float:
        """Seconds until a call returns, over fewer calls than the device's queue holds."""
        call()
        return min(self._returning(call, QUEUED) for _ in range(BEST_OF))

    def wall_seconds(self, call: Call) -> float:
        """Seconds of one call with a device that is idle before and after it."""
        call()
        return min(self._returning(call, 1, wait=True) for _ in range(BEST_OF))

    def _returning(self, call: Call, repeats: int, wait: bool = False) -> float:
        torch.cuda.synchronize(self.device)
        clock = time.perf_counter()
        for _ in range(repeats):
            call()
        if wait:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - clock
        torch.cuda.synchronize(self.device)
        return seconds / repeats

    def _between_events(self, call: Call, repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return max(begin.elapsed_time(end) / 1e3 / repeats, 1e-7)

    def _captured(self, call: Call, repeats: int, what: str) -> Call | None:
        """Capture repeated calls; None if this device cannot."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for _ in range(repeats):
                        call()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.graphs_failed[what] = str(error).splitlines()[0]
            torch.cuda.synchronize(self.device)
            return None
        return graph.replay


def reference_load() -> Call:
    """A fixed load of about a millisecond: products, and traffic beyond the caches of a core."""
    a, b = torch.full((256, 256), 0.5), torch.full((256, 256), 0.25)
    c, d = torch.full((2**18,), 0.5), torch.full((2**18,), 0.25)

    def load() -> None:
        torch.mm(a, b)
        torch.mm(b, a)
        torch.add(c, d)

    return load


def stopwatch_of(device: torch.device) -> CpuStopwatch | CudaStopwatch:
    """A stopwatch for a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


def _clocked(call: Call) -> float:
    clock = time.perf_counter()
    call()
    return time.perf_counter() - clock
