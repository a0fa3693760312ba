"""One window of the profiler: start it, step it, and close it even after failures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.engine.profiling.option import Profile
from simpletune.engine.profiling.schedule import TraceWindow

if TYPE_CHECKING:
    from torch import nn
    from torch._C._autograd import _KinetoEvent
    from torch.profiler import profile, record_function

SNAPSHOT = "memory_snapshot.pickle"
ENTRIES = 100_000


class Window:
    """A new profiler for a few steps.

    Args:
        option: what to record.
        place: the steps.
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
        self.place, self._blocks, self._snapshot = place, blocks, snapshot
        self.done = 0
        """Number of steps so far."""
        self._profiler = make_profiler(option, place, cuda)
        self._undo: list[Callable[[], object]] = []

    @property
    def recorded(self) -> int:
        """Number of complete recorded steps, without warm-up."""
        return max(0, self.done - self.place.warmup)

    @property
    def full(self) -> bool:
        """Whether the window's last step is done."""
        return self.done >= self.place.warmup + self.place.active

    def start(self) -> None:
        """Record from the next step on.

        Raises:
            RuntimeError: another profiler is active.
        """
        import torch

        if torch.autograd._profiler_enabled():
            raise RuntimeError("another profiler is active, and only one can be")
        if self._snapshot is not None:
            self._undo.append(lambda: torch.cuda.memory._record_memory_history(enabled=None))
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a window without warm-up; announce() reports it already
            self._undo.append(self._stop_profiler)
            self._profiler.start()
        for number, block in enumerate(self._blocks):
            self._undo += name_ranges(block, f"block {number}")

    def step(self) -> None:
        """Count a finished step; ``close`` ends the last one."""
        self.done += 1
        if not self.full:
            self._profiler.step()

    def close(self, keep: bool = True) -> None:
        """Stop everything that was started, even if a part fails to stop. A second call does nothing.

        Args:
            keep: whether to write the memory history too.

        Raises:
            Exception: the first failure, after everything is stopped.
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
        inner = self._profiler.profiler
        assert inner is not None and inner.kineto_results is not None
        return inner.kineto_results.events()

    def export(self, file: str) -> None:
        """Write the raw trace; call after ``close``."""
        self._profiler.export_chrome_trace(file)

    def _stop_profiler(self) -> None:
        import torch

        try:
            self._profiler.stop()
        finally:
            if (
                torch.autograd._profiler_enabled()
            ):  # stop() failed half-way: a running profiler would fill the host's memory
                torch.autograd._disable_profiler()

    def _dump(self) -> None:
        import torch

        assert self._snapshot is not None
        self._snapshot.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._snapshot))


def make_profiler(option: Profile, place: TraceWindow, cuda: bool) -> profile:
    """Create torch's profiler for the steps of a window; on its own it prints and writes nothing."""
    from torch.profiler import ProfilerActivity, profile, schedule

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            schedule=schedule(wait=0, warmup=place.warmup, active=place.active, repeat=1),
            with_stack=option.with_stack,
            record_shapes=option.record_shapes,
            profile_memory=option.memory,
        )


def name_ranges(module: nn.Module, name: str) -> list[Callable[[], None]]:
    """Add a named range around a module's forward pass.

    Returns:
        Functions that remove the hooks.
    """
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
