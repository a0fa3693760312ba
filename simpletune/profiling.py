"""PyTorch Profiler traces, at most one an epoch: a fresh, bounded profiler for each, never in the way of training."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from simpletune.config import Profile
from simpletune.terminal import say

# torch-tb-profiler 0.4.3 knows the categories of older traces; with today's it shows no device time.
RENAMED = {"cuda_runtime": "Runtime", "cuda_driver": "Runtime", "fwdbwd": "forward_backward"}


def spread(epochs: int, traces: int) -> list[int]:
    """Which epochs are traced: evenly spread, the first and the last among them."""
    if traces >= epochs:
        return list(range(epochs))
    if traces <= 1:
        return [0][:traces]
    return [round(number * (epochs - 1) / (traces - 1)) for number in range(traces)]


def fit_window(option: Profile, steps: int) -> tuple[int, int, int]:
    """(wait, warmup, active) cut down to an epoch of that many steps: waiting goes first, then warm-up."""
    active = min(option.active, steps)
    warmup = min(option.warmup, steps - active)
    return min(option.wait, steps - active - warmup), warmup, active


class EpochTraces:
    """Traces the chosen epochs of a run, each into a folder of its own.

    A failure of the profiler is reported once and ends tracing, not training.

    Args:
        option: the window and how many epochs.
        folder: where ``epoch-NNN`` folders are made.
        steps: steps of the run.
        steps_per_epoch: steps of an epoch.
        cuda: whether to record the device too.
    """

    def __init__(self, option: Profile, folder: Path, steps: int, steps_per_epoch: int, cuda: bool):
        self.option, self.folder, self.cuda = option, folder, cuda
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        self.epochs = spread(-(-steps // steps_per_epoch), option.max_traces)
        self.written: list[Path] = []
        self._profiler: Any = None
        self._left = 0
        self._failed = False

    def __enter__(self) -> EpochTraces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard(self._stop)

    def before_step(self, step: int) -> None:
        """Open a window if this step begins a traced epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if place == 0 and epoch in self.epochs and not self._failed:
            self._guard(self._start, epoch, min(self.steps_per_epoch, self.steps - step))

    def after_step(self) -> None:
        """Count a step; close the window after its last."""
        if self._profiler is None:
            return
        self._guard(self._profiler.step)
        self._left -= 1
        if self._left <= 0:
            self._guard(self._stop)

    def _start(self, epoch: int, steps: int) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        self._stop()
        wait, warmup, active = fit_window(self.option, steps)
        if warmup < self.option.warmup and not self.written:
            say(f"profile an epoch has {steps} step{'s' if steps > 1 else ''}: traced without the full warm-up")
        folder = self.folder / f"epoch-{epoch:03d}"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self._left = wait + warmup + active
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a window without warm-up: short epochs have none, and that is said
            profiler = profile(
                activities=activities,
                schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
                on_trace_ready=lambda p: self._write(p, folder),
                with_stack=False,
            )
            profiler.start()
        self._profiler = profiler

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write(self, profiler: Any, folder: Path) -> None:
        from torch.profiler import tensorboard_trace_handler

        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
        tensorboard_trace_handler(str(folder), use_gzip=True)(profiler)
        for file in sorted(set(folder.iterdir()) - before):
            rename_categories(file)
            self.written.append(file)

    def _guard(self, call: Any, *args: Any) -> None:
        """Run a call into the profiler; the first failure is reported and ends tracing."""
        if self._failed:
            return
        try:
            call(*args)
        except Exception as error:
            self._failed, self._profiler = True, None
            warnings.warn(f"the profiler failed and is off for the rest of the run: {error!r}", stacklevel=2)


def rename_categories(file: Path) -> None:
    """Give a gzipped trace the category names that torch-tb-profiler knows."""
    with gzip.open(file, "rt", encoding="utf-8") as handle:
        trace = json.load(handle)
    for event in trace["traceEvents"]:
        event["cat"] = RENAMED.get(event.get("cat", ""), event.get("cat", ""))
    aside = file.with_name(f".{file.name}.part")
    with gzip.open(aside, "wt", encoding="utf-8") as handle:
        json.dump(trace, handle)
    aside.replace(file)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A named range in the trace: data, forward, backward, clip, optimizer."""
    from torch.profiler import record_function

    with record_function(f"## {name} ##"):
        yield
