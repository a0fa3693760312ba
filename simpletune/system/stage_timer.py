"""Measure time and peak memory by stage; the job's peak is the largest of the stages' peaks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from simpletune.system.portable import peak_resident_bytes

GIB = 2**30


@dataclass
class Stage:
    """The time and peak memory of one stage; GPU peaks are None without CUDA."""

    seconds: float = 0.0
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    peak_rss_gib: float = 0.0

    def merge(self, other: Stage) -> None:
        """Merge another visit of the stage: add times and take the larger peaks."""
        self.seconds += other.seconds
        self.peak_rss_gib = max(self.peak_rss_gib, other.peak_rss_gib)
        for name in ("peak_allocated_gib", "peak_reserved_gib"):
            peaks = [peak for peak in (getattr(self, name), getattr(other, name)) if peak is not None]
            setattr(self, name, max(peaks, default=None))


@dataclass
class StageTimer:
    """The times and peaks of the stages of a run."""

    cuda: bool
    by_name: dict[str, Stage] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one visit of a stage. A nested stage suspends the outer one, so nothing counts twice."""
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
        # Reset the kernel's record of the peak resident set. Where that is not supported, the peak covers the whole
        # process so far, which is never too low.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
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
        """Return the largest of the stages' peaks."""
        return peak_of_stages(self.by_name, name)

    def memory_now(self) -> str:
        """Describe the stage's peak so far: allocated on the GPU, or the process's without a GPU."""
        if not self.cuda:
            return f"{peak_rss_gib():.2f} GiB RAM"
        import torch

        return f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB GPU"

    def as_json(self) -> dict[str, Any]:
        """Return the stages' measurements, rounded to four decimals."""
        return stages_as_json(self.by_name)


def peak_of_stages(stages: Mapping[str, Stage], name: str) -> float | None:
    """Return the largest of the stages' peaks of one kind, which is the peak of the whole job."""
    return max((value for stage in stages.values() if (value := getattr(stage, name)) is not None), default=None)


def stages_as_json(stages: Mapping[str, Stage]) -> dict[str, Any]:
    """Return the stages' measurements, rounded to four decimals."""
    return {name: {key: round_figure(value) for key, value in asdict(s).items()} for name, s in stages.items()}


def round_figure(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def peak_rss_gib() -> float:
    """Return the peak resident set since the last reset, in GiB."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / GIB
    except (OSError, StopIteration):
        return peak_resident_bytes() / GIB
