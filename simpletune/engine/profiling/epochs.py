"""Trace a window in each chosen epoch of a run. No failure here stops the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.engine.profiling.option import Profile
from simpletune.engine.profiling.schedule import TraceWindow, place_window, traced_epochs
from simpletune.system.console import say
from simpletune.system.options import plural

if TYPE_CHECKING:
    from torch import nn

    from simpletune.engine.profiling.window import Window

P = ParamSpec("P")
T = TypeVar("T")


def never_interrupted(step: int) -> bool:
    """Report that nothing runs between steps."""
    return False


def warn_on_console(text: str) -> None:
    """Print a warning."""
    say(f"warning {text}")


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
    interrupted: Callable[[int], bool] = never_interrupted
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
        facts: Facts | None = None,
        warn: Callable[[str], None] = warn_on_console,
    ):
        self.option, self.folder, self.facts, self.warn = option, folder, facts or Facts(), warn
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        self.epochs = traced_epochs(-(-steps // steps_per_epoch), option.max_traces)
        self.written: list[Path] = []
        """The traces."""
        self.summaries: list[Path] = []
        """The summaries, including those of dropped traces."""
        self._epoch: int | None = None
        self._place: TraceWindow | None = None
        self._window: Window | None = None
        self._said: set[str] = set()

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
        """Before the first step, print what will be recorded if epochs are too short for the window.

        Args:
            start: first step of the run.
        """
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
        say(
            f"profile a trace needs {wanted} consecutive steps, and an epoch has {shortest.warmup + shortest.active} "
            f"between validation and saving: it records {plural(shortest.active, 'step')} {warm}. "
            "Increase data.repeats for longer epochs, or turn traces off with profile.max_traces=0"
        )

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
        self._guard(window.step)
        if window.full or self._failed:
            self._window = None
            self._guard(window.close)
            if window.full:
                self._guard(self._leave, window)

    def add_memory(self, predicted: Callable[[], Sequence[MemorySnapshot]]) -> None:
        """Add a step's predicted memory to the summaries, if there are any.

        Args:
            predicted: returns the memory snapshots of one step, in order; may fail.
        """
        if not self.summaries:
            return
        from simpletune.engine.profiling import summary

        snapshots = self._guard(predicted)
        if not snapshots:
            return
        for file in self.summaries:
            self._guard(summary.add_memory, file, snapshots)

    @property
    def _failed(self) -> bool:
        return "failed" in self._said

    def _choose(self, epoch: int, step: int) -> TraceWindow | None:
        """Place the window of an epoch that starts at this step; None if the epoch was traced before."""
        from simpletune.engine.profiling.summary import JSON

        if (self._folder(epoch) / JSON).exists():
            return None
        stop = min((epoch + 1) * self.steps_per_epoch, self.steps)
        return place_window(self.option, step, stop, self.facts.interrupted)

    def _start(self, place: TraceWindow) -> None:
        from simpletune.engine.profiling.window import SNAPSHOT, Window

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
        from simpletune.engine.profiling import summary
        from simpletune.engine.profiling.events import read_events

        place = window.place
        epoch = place.start // self.steps_per_epoch
        folder = self._folder(epoch)
        folder.mkdir(parents=True, exist_ok=True)
        notes = self._guard(self._write, window, folder)
        recording = read_events(window.events())
        first = place.start + place.warmup
        flops = self.facts.flops and [self.facts.flops(first + number) for number in range(window.recorded)]
        values = summary.summarise(epoch, recording, window.recorded, flops, self.facts.device, self.facts.cuda)
        values["notes"] += ["the trace could not be written"] if notes is None else notes
        if self.option.snapshot and not self.facts.cuda:
            values["notes"].append("profile.snapshot records CUDA memory, and this run has no CUDA device")
        self.summaries.append(summary.write_summary(folder, values))

    def _write(self, window: Window, folder: Path) -> list[str]:
        """Write the trace.

        Returns:
            Notes for the summary.
        """
        from simpletune.engine.profiling.trace_file import TooLarge, write_trace

        try:
            self.written.append(write_trace(window.export, folder, self.option.max_mb))
        except TooLarge as error:
            text = (
                f"the trace of {folder.name} has {error}, over profile.max_mb {self.option.max_mb:g}: it was dropped, "
                "its summary is kept. Use a smaller profile.active, profile.with_stack=false, or a larger max_mb"
            )
            self._once("large", self.warn, text)
            return [text]
        return []

    def _folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:03d}"

    def _guard(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call into the profiler; report the first failure, and open no window after it."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # of any kind: a failed trace must not end the run
            reason = " ".join(str(error).split())[:300] or "no reason given"
            text = f"the profiler failed and is off for the rest of the run ({type(error).__name__}: {reason})"
            self._once("failed", self.warn, text)
            return None

    def _once(self, key: str, speak: Callable[[str], None], text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            speak(text)
