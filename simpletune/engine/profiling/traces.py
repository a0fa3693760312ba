"""Trace a window of steps in each chosen epoch of a run. No failure here stops the training.

torch.profiler and its schedule record a window. What they leave to do: to find consecutive steps without validation or
saving in between, to let go of everything however the loop ends (``on_trace_ready`` is called of a window that an error
cuts short, too), and to keep a trace small and readable for TensorBoard's plugin.
"""

from __future__ import annotations

import gzip
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.engine.profiling import summary
from simpletune.engine.profiling.figures import read_events
from simpletune.engine.profiling.profile_option import Profile
from simpletune.system.console import detail
from simpletune.system.options import plural

if TYPE_CHECKING:
    from torch import nn
    from torch._C._autograd import _KinetoEvent
    from torch.profiler import record_function

P = ParamSpec("P")
T = TypeVar("T")
SNAPSHOT = "memory_snapshot.pickle"
ENTRIES = 100_000  # of CUDA's memory history
SUFFIX = ".pt.trace.json.gz"
MB = 10**6
# torch-tb-profiler 0.4.3 knows only the categories of older traces; with new ones its operator view has no device time.
RENAMED = {
    '"cat": "cuda_runtime"': '"cat": "Runtime"',
    '"cat": "cuda_driver"': '"cat": "Runtime"',
    '"cat": "fwdbwd"': '"cat": "forward_backward"',
}


@dataclass(frozen=True)
class Facts:
    """Facts about a run that the profiler cannot know."""

    cuda: bool = False
    """Whether to record the device too."""
    device: str = ""
    """Name of the device, to look up its peak rate."""
    flops: Callable[[int], float] | None = None
    """Floating-point operations of a step, by its number; None: unknown."""
    blocks: Sequence[nn.Module] = ()
    """The model's blocks, to name ranges for."""
    interrupted: Callable[[int], bool] = lambda step: False
    """Whether something else (validation, saving) runs between a step and the next."""


class EpochTraces:
    """Trace the chosen epochs of a run, each into its own folder, with a summary beside the trace.

    A failure of the profiler is reported once and ends tracing, not training. A run that is resumed in the middle of an
    epoch traces the rest of it, unless the epoch was traced before.

    Args:
        option: the window and the number of epochs.
        folder: parent of the ``epoch-NNN`` folders.
        steps: the run's steps.
        steps_per_epoch: steps of one epoch.
        facts: facts about the run.
        warn: prints one line.
    """

    def __init__(
        self,
        option: Profile,
        folder: Path,
        steps: int,
        steps_per_epoch: int,
        facts: Facts,
        warn: Callable[[str], None],
    ):
        # What the run asks for
        self.option = option
        self.folder = folder
        self.facts = facts
        self.warn = warn
        self.steps = steps
        self.steps_per_epoch = steps_per_epoch
        self.epochs = traced_epochs(-(-steps // steps_per_epoch), option.max_traces)

        # Results
        self.written: list[Path] = []
        """The traces."""
        self.summaries: list[Path] = []
        """The summaries, including those of dropped traces."""

        # The current epoch
        self._epoch: int | None = None
        self._place: TraceWindow | None = None
        self._window: Window | None = None
        self._failed = False
        self._dropped = False
        """Whether it was said that a trace was too large."""

    def __enter__(self) -> EpochTraces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        self._guard(window.close)
        if kind is None and window.recorded:  # the loop ended early without an error
            self._guard(self._leave, window)

    def announce(self, start: int) -> None:
        """Say, before the run's first step, ``start``, what will be recorded if epochs are too short for the window."""
        places = []
        for epoch in self.epochs:
            first = max(start, epoch * self.steps_per_epoch)
            place = self._guard(self._choose, epoch, first) if first // self.steps_per_epoch == epoch else None
            places += [place] if place is not None and first < self.steps else []
        shortest = min(places, key=lambda place: place.warmup + place.active, default=None)
        wanted = self.option.warmup + self.option.active
        if shortest is None or shortest.warmup + shortest.active == wanted:
            return
        warm = f"after {shortest.warmup} of warm-up" if shortest.warmup else "without warm-up, so times are too high"
        detail(
            f"profile a trace needs {wanted} consecutive steps, and an epoch has {shortest.warmup + shortest.active} "
            f"between validation and saving: it records {plural(shortest.active, 'step')} {warm}. "
            "Increase data.repeats for longer epochs, or turn traces off with profile.max_traces=0"
        )

    @property
    def records(self) -> bool:
        """Whether a window is open."""
        return self._window is not None

    def before_step(self, step: int) -> None:
        """Open a window if one starts at this step."""
        epoch = step // self.steps_per_epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._place = self._guard(self._choose, epoch, step) if epoch in self.epochs else None
        if self._place is not None and step == self._place.start and not self._failed:
            self._guard(self._start, self._place)

    def after_step(self) -> None:
        """Count a step; after the window's last step, close it and write its results."""
        window = self._window
        if window is None:
            return
        is_last = self._guard(window.step)
        if is_last or self._failed:
            self._window = None
            self._guard(window.close)
            if is_last:
                self._guard(self._leave, window)

    def add_memory(self, predicted: Callable[[], Sequence[MemorySnapshot]]) -> None:
        """Add a step's predicted memory, in order, to the summaries, if there are any; the prediction may fail."""
        if not self.summaries:
            return
        if snapshots := self._guard(predicted):
            for file in self.summaries:
                self._guard(summary.add_memory, file, snapshots)

    def _choose(self, epoch: int, step: int) -> TraceWindow | None:
        """Place the window of an epoch that starts at this step; None if the epoch was traced before."""
        if (self._folder(epoch) / summary.JSON).exists():
            return None
        stop = min((epoch + 1) * self.steps_per_epoch, self.steps)
        return place_window(self.option, step, stop, self.facts.interrupted)

    def _start(self, place: TraceWindow) -> None:
        folder = self._folder(place.start // self.steps_per_epoch)
        snapshot = folder / SNAPSHOT if self.option.snapshot and self.facts.cuda else None
        blocks = self.facts.blocks if self.option.blocks else ()
        window = Window(self.option, place, self.facts.cuda, blocks, snapshot)
        try:
            window.start()
        except BaseException:
            with suppress(Exception):  # parts that never started may fail to stop; report the first error
                window.close(keep=False)
            raise
        self._window = window

    def _leave(self, window: Window) -> None:
        """Write the trace and its summary; write the summary even if the trace fails."""
        place = window.place
        epoch = place.start // self.steps_per_epoch
        folder = self._folder(epoch)
        folder.mkdir(parents=True, exist_ok=True)
        notes = self._guard(self._write, window, folder)
        recording = read_events(window.events())
        first = place.start + place.warmup
        flops = self.facts.flops and [self.facts.flops(first + number) for number in range(window.recorded)]
        values = summary.summarise(epoch, recording, window.recorded, flops, self.facts.device, self.facts.cuda)
        several = f"steps {first + 1} to {first + window.recorded}"
        values["notes"].insert(0, f"recorded: {several if window.recorded > 1 else f'step {first + 1}'} of the run")
        values["notes"] += ["the trace could not be written"] if notes is None else notes
        if self.option.snapshot and not self.facts.cuda:
            values["notes"].append("profile.snapshot records CUDA memory, and this run has no CUDA device")
        self.summaries.append(summary.write_summary(folder, values))

    def _write(self, window: Window, folder: Path) -> list[str]:
        """Write the trace; return notes for the summary."""
        try:
            self.written.append(write_trace(window.profiler.export_chrome_trace, folder, self.option.max_mb))
        except TooLarge as error:
            text = (
                f"the trace of {folder.name} has {error}, over profile.max_mb {self.option.max_mb:g}: it was dropped, "
                "its summary is kept. Use a smaller profile.active, profile.with_stack=false, or a larger max_mb"
            )
            if not self._dropped:
                self._dropped = True
                self.warn(text)
            return [text]
        return []

    def _folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:03d}"

    def _guard(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call into the profiler; report the first failure, and open no window after it."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # of any kind: a failed trace must not end the run
            if not self._failed:
                self._failed = True
                reason = " ".join(str(error).split())[:300] or "no reason given"
                self.warn(f"the profiler failed and is off for the rest of the run ({type(error).__name__}: {reason})")
            return None


def traced_epochs(epochs: int, traces: int) -> list[int]:
    """Choose epochs to trace: evenly spread, including the first and the last."""
    if traces >= epochs:
        return list(range(epochs))
    if traces <= 1:
        return [0][:traces]
    return [round(number * (epochs - 1) / (traces - 1)) for number in range(traces)]


@dataclass(frozen=True)
class TraceWindow:
    """The steps of a window."""

    start: int
    """First step that the profiler records."""
    warmup: int
    """Number of recorded steps to discard."""
    active: int
    """Number of recorded steps to keep."""


def place_window(option: Profile, first: int, stop: int, interrupted: Callable[[int], bool]) -> TraceWindow:
    """Place the window in an epoch: at the first run of enough consecutive steps, after ``wait`` if possible.

    If there are too few steps, give up ``wait`` first, then warm-up, then recorded steps.

    Args:
        first: the epoch's first step, or the first step of a resumed run.
        stop: the step after the epoch's last.
        interrupted: ``Facts.interrupted``.
    """
    wanted = option.warmup + option.active
    best = first, first
    for begin in (first + option.wait, first):
        start = begin
        for step in range(begin, stop):
            if step + 1 - start > best[1] - best[0]:
                best = start, step + 1
            if best[1] - best[0] >= wanted:
                return TraceWindow(best[0], option.warmup, option.active)
            if interrupted(step):
                start = step + 1
    steps = best[1] - best[0]
    active = min(option.active, steps)
    return TraceWindow(best[0], steps - active, active)


class Window:
    """A new profiler for a few steps.

    Args:
        cuda: whether to record the device too.
        blocks: modules to name ranges for.
        snapshot: file for CUDA's memory history; None: do not record it.
    """

    def __init__(
        self,
        option: Profile,
        place: TraceWindow,
        cuda: bool,
        blocks: Sequence[nn.Module] = (),
        snapshot: Path | None = None,
    ):
        import torch
        from torch.profiler import ProfilerActivity

        self.place = place
        self._blocks = blocks
        self._snapshot = snapshot
        self.done = 0
        """Number of steps so far."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a window without warm-up; announce() reports it already
            self.profiler = torch.profiler.profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
                schedule=torch.profiler.schedule(wait=0, warmup=place.warmup, active=place.active, repeat=1),
                with_stack=option.with_stack,
                record_shapes=option.record_shapes,
                profile_memory=option.memory,
            )
        self._undo: list[Callable[[], object]] = []

    @property
    def recorded(self) -> int:
        """Number of complete recorded steps, without warm-up."""
        return max(0, self.done - self.place.warmup)

    def start(self) -> None:
        """Record from the next step on. Raises RuntimeError if another profiler is active."""
        import torch

        if torch.autograd._profiler_enabled():
            raise RuntimeError("another profiler is active, and only one can be")
        if self._snapshot is not None:
            self._undo.append(lambda: torch.cuda.memory._record_memory_history(enabled=None))
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._undo.append(self._stop_profiler)
            self.profiler.start()
        for number, block in enumerate(self._blocks):
            self._undo += name_ranges(block, f"block {number}")

    def step(self) -> bool:
        """Count a finished step; return whether it is the last, which ``close`` ends."""
        self.done += 1
        is_last = self.done >= self.place.warmup + self.place.active
        if not is_last:
            self.profiler.step()
        return is_last

    def close(self, keep: bool = True) -> None:
        """Stop everything that was started, even if a part fails to stop; then raise the first failure.

        A second call does nothing. With ``keep``, writes the memory history too.
        """
        if self._undo and self._snapshot is not None and keep:
            self._undo.insert(1, self._dump)  # after the profiler stops, before recording of the history ends
        errors = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def events(self) -> Sequence[_KinetoEvent]:
        """Return the profiler's events; call after ``close``."""
        inner = self.profiler.profiler
        assert inner is not None and inner.kineto_results is not None
        return inner.kineto_results.events()

    def _stop_profiler(self) -> None:
        import torch

        try:
            self.profiler.stop()
        finally:
            if torch.autograd._profiler_enabled():  # stop() failed half-way; it would fill the host's memory
                torch.autograd._disable_profiler()

    def _dump(self) -> None:
        import torch

        assert self._snapshot is not None
        self._snapshot.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._snapshot))


def name_ranges(module: nn.Module, name: str) -> list[Callable[[], None]]:
    """Add a named range around a module's forward pass; return functions that remove the hooks."""
    from torch.profiler import record_function

    ranges: list[record_function] = []

    def begin(*_: object) -> None:
        ranges.append(record_function(name))
        ranges[-1].__enter__()

    def end(*_: object) -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)

    before = module.register_forward_pre_hook(begin)
    return [before.remove, module.register_forward_hook(end, always_call=True).remove]


class TooLarge(Exception):
    """A trace that exceeds the maximum size."""


def write_trace(export: Callable[[str], object], folder: Path, max_mb: float) -> Path:
    """Export a trace into an epoch's folder, gzipped, with the category names that TensorBoard's plugin knows. Raises
    TooLarge if the file would exceed ``max_mb`` of 10^6 bytes; as after any error, nothing is left behind."""
    with TemporaryDirectory(dir=folder, prefix=".trace-") as temporary:
        raw, packed = Path(temporary) / "raw.json", Path(temporary) / "packed.json.gz"
        export(str(raw))
        size, end = raw.stat().st_size if raw.exists() else 0, b""
        if size:
            with open(raw, "rb") as handle:
                handle.seek(max(0, size - 64))
                end = handle.read().strip()
        if not end.endswith(b"}"):  # the profiler does not report failed writes
            raise OSError(f"the trace was truncated after {size:,} bytes: is the disk full?")
        pack(raw, packed, max_mb)
        file = folder / f"training.{time.time_ns()}{SUFFIX}"
        os.replace(packed, file)
    return file


def pack(raw: Path, packed: Path, max_mb: float) -> None:
    """Rename a raw trace's categories and gzip it."""
    with open(raw, encoding="utf-8") as source, open(packed, "wb") as out, gzip.open(out, "wt", 6, "utf-8") as target:
        for number, line in enumerate(source):
            for old, new in RENAMED.items():
                if old in line:  # quotes inside strings are escaped, so nothing else matches
                    line = line.replace(old, new)
                    break
            target.write(line)
            if number % 10_000 == 0 and out.tell() > max_mb * MB:
                break
    if packed.stat().st_size > max_mb * MB:
        raise TooLarge(f"{packed.stat().st_size / MB:.3g} MB or more")
