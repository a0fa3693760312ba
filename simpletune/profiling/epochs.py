"""The windows of a run: one in each chosen epoch, and what each leaves. Nothing that fails here fails the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from simpletune.memory.snapshot import MemorySnapshot
from simpletune.options import plural
from simpletune.profiling.option import Profile
from simpletune.profiling.schedule import Place, evenly_spaced, place_window
from simpletune.system.console import say

if TYPE_CHECKING:
    from torch import nn

    from simpletune.profiling.window import Window

P = ParamSpec("P")
T = TypeVar("T")


def never_interrupted(step: int) -> bool:
    """No step is followed by anything but the next."""
    return False


def warn_on_console(text: str) -> None:
    """Say a warning on the terminal."""
    say(f"warning {text}")


@dataclass(frozen=True)
class Facts:
    """What the profiler itself cannot know of a run."""

    cuda: bool = False
    """Whether the device is recorded too."""
    device: str = ""
    """Its name, by which its peak is known."""
    flops: Callable[[int], float] | None = None
    """Floating-point operations of a step, by its number; None: unknown."""
    blocks: Sequence[nn.Module] = ()
    """The model's blocks, to name ranges for."""
    interrupted: Callable[[int], bool] = never_interrupted
    """Whether something else (validation, saving) stands between a step and the next."""


class EpochTraces:
    """Traces the chosen epochs of a run, each into a folder of its own, with a summary beside the trace.

    A failure of the profiler is reported once and ends tracing, not training. A run that is resumed in the middle of an
    epoch traces the rest of it, unless the epoch has been traced before.

    Args:
        option: the window and how many epochs.
        folder: where ``epoch-NNN`` folders are made.
        steps: steps of the run.
        steps_per_epoch: steps of an epoch.
        facts: of the run.
        warn: says one line.
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
        self.epochs = evenly_spaced(-(-steps // steps_per_epoch), option.max_traces)
        self.written: list[Path] = []
        """The traces."""
        self.summaries: list[Path] = []
        """Their summaries, and those of traces that were dropped."""
        self._epoch: int | None = None
        self._place: Place | None = None
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
        if kind is None and window.recorded:  # the loop has ended early, and well
            self._guard(self._leave, window)

    def announce(self, start: int) -> None:
        """Say before the first step what is recorded where epochs are too short for the window.

        Args:
            start: the step that the run starts from.
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
        warm = f"after {shortest.warmup} of warm-up" if shortest.warmup else "without warm-up: its times are too long"
        say(
            f"profile a trace takes {wanted} steps in a row, and an epoch has {shortest.warmup + shortest.active} "
            f"(validation and saving interrupt): it records {plural(shortest.active, 'step')} {warm}. "
            "A larger data.repeats makes epochs longer, profile.max_traces=0 turns traces off"
        )

    def before_step(self, step: int) -> None:
        """Open a window if one begins with this step."""
        epoch = step // self.steps_per_epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._place = self._guard(self._choose, epoch, step) if epoch in self.epochs else None
        if self._place is not None and step == self._place.start and not self._failed:
            self._guard(self._start, self._place)

    def after_step(self) -> None:
        """Count a step; after its last, close the window and write what it saw."""
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
        """Put a predicted step's memory into the summaries, if there are any.

        Args:
            predicted: gives what lives in one step, in order; it may fail.
        """
        if not self.summaries:
            return
        from simpletune.profiling import summary

        snapshots = self._guard(predicted)
        if not snapshots:
            return
        for file in self.summaries:
            self._guard(summary.add_memory, file, snapshots)

    @property
    def _failed(self) -> bool:
        return "failed" in self._said

    def _choose(self, epoch: int, step: int) -> Place | None:
        """Where the window of an epoch lies that is entered with this step; None: it was traced before."""
        from simpletune.profiling.summary import JSON

        if (self._folder(epoch) / JSON).exists():
            return None
        stop = min((epoch + 1) * self.steps_per_epoch, self.steps)
        return place_window(self.option, step, stop, self.facts.interrupted)

    def _start(self, place: Place) -> None:
        from simpletune.profiling.window import SNAPSHOT, Window

        folder = self._folder(place.start // self.steps_per_epoch)
        snapshot = folder / SNAPSHOT if self.option.snapshot and self.facts.cuda else None
        blocks = self.facts.blocks if self.option.blocks else ()
        window = Window(self.option, place, self.facts.cuda, blocks, snapshot)
        try:
            window.start()
        except BaseException:
            with suppress(Exception):  # what has not started need not stop; the first error is the one to tell
                window.close(keep=False)
            raise
        self._window = window

    def _leave(self, window: Window) -> None:
        """Write the trace and its summary; the one without the other if it must be."""
        from simpletune.profiling import summary
        from simpletune.profiling.events import read_events

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
            values["notes"].append("profile.snapshot keeps the history of CUDA's memory, and there is none here")
        self.summaries.append(summary.write(folder, values))

    def _write(self, window: Window, folder: Path) -> list[str]:
        """Write the trace.

        Returns:
            What is to be said of it.
        """
        from simpletune.profiling.trace_file import TooLarge, write_trace

        try:
            self.written.append(write_trace(window.export, folder, self.option.max_mb))
        except TooLarge as error:
            text = (
                f"the trace of {folder.name} takes {error}, and profile.max_mb is {self.option.max_mb:g}: dropped, its "
                "summary is kept. Use a smaller profile.active, profile.with_stack false, or a larger max_mb"
            )
            self._once("large", self.warn, text)
            return [text]
        return []

    def _folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:03d}"

    def _guard(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call into the profiler; the first failure is reported, and no window begins after it."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # whatever it is: a trace is not worth a run
            reason = " ".join(str(error).split())[:300] or "no reason given"
            text = f"the profiler failed and is off for the rest of the run ({type(error).__name__}: {reason})"
            self._once("failed", self.warn, text)
            return None

    def _once(self, key: str, speak: Callable[[str], None], text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            speak(text)
