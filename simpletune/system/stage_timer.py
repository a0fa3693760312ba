"""Time and peak memory by stage: each stage reports its own, and the job's peak is the largest of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass
class Stage:
    """What one stage took; peaks in GiB, None without CUDA."""

    seconds: float = 0.0
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    peak_rss_gib: float = 0.0

    def merge(self, other: Stage) -> None:
        """Add another visit of the same stage: times add up, the larger peak stays."""
        self.seconds += other.seconds
        self.peak_rss_gib = max(self.peak_rss_gib, other.peak_rss_gib)
        for name in ("peak_allocated_gib", "peak_reserved_gib"):
            peaks = [peak for peak in (getattr(self, name), getattr(other, name)) if peak is not None]
            setattr(self, name, max(peaks, default=None))


@dataclass
class StageTimer:
    """The stages of a run, by name."""

    cuda: bool
    by_name: dict[str, Stage] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one visit of a stage. A stage inside another suspends it: peaks and seconds are counted once."""
        if self._open:
            self._close(self._open[-1])
        self._open.append(name)
        self._begin()
        try:
            yield
        finally:
            self._close(name)
            self._open.pop()
            self._begin()

    def _begin(self) -> None:
        self._start = time.perf_counter()
        _reset_peak_rss()
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def _close(self, name: str) -> None:
        measured = Stage(seconds=time.perf_counter() - self._start, peak_rss_gib=peak_rss_gib())
        if self.cuda:
            import torch

            measured.peak_allocated_gib = torch.cuda.max_memory_allocated() / GIB
            measured.peak_reserved_gib = torch.cuda.max_memory_reserved() / GIB
        self.by_name.setdefault(name, Stage()).merge(measured)

    def peak(self, name: str) -> float | None:
        """The largest of the stages' peaks."""
        return largest_peak(self.by_name, name)

    def memory_now(self) -> str:
        """The peak of the stage so far in words: allocated on the GPU, or without one of the process."""
        if not self.cuda:
            return f"{peak_rss_gib():.2f} GiB RAM"
        import torch

        return f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB GPU"

    def as_json(self) -> dict[str, Any]:
        """Every stage's figures, rounded to what is measured."""
        return stages_as_json(self.by_name)


def largest_peak(stages: Mapping[str, Stage], name: str) -> float | None:
    """The largest of the stages' peaks of one kind: that of the whole job."""
    return max((value for stage in stages.values() if (value := getattr(stage, name)) is not None), default=None)


def stages_as_json(stages: Mapping[str, Stage]) -> dict[str, Any]:
    """Every stage's figures, rounded to what is measured."""
    return {name: {key: rounded(value) for key, value in asdict(s).items()} for name, s in stages.items()}


def rounded(value: float | None) -> float | None:
    """Four decimals."""
    return None if value is None else round(value, 4)


def _reset_peak_rss() -> None:
    """Let the kernel forget this process's peak resident set (Linux; elsewhere the peak is the process's)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # a sandbox without it: the peak is then the whole process's so far, which is never too low
        return


def peak_rss_gib() -> float:
    """Peak resident set since the last reset, in GiB."""
    try:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / GIB
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
