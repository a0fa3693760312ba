"""What the loop writes down of every step, once the device is done with it: one step after it was launched."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from simpletune.runs.folder import append_metrics
from simpletune.system import signals as stopping
from simpletune.system.console import TrainingProgress
from simpletune.training.pending_steps import PendingStep

if TYPE_CHECKING:
    from simpletune.training.setup import Run


class MetricsQueue:
    """Keeps launched steps, and writes them into metrics, trackers and the progress line, in their order.

    Args:
        run: of the loop.
        line: the progress.
    """

    def __init__(self, run: Run, line: TrainingProgress):
        self._run, self._line = run, line
        self._ahead = 0 if run.watch.gate is not None else 1  # what the gate has read need not wait
        self._open: deque[PendingStep] = deque()
        self._asked = False

    def add(self, launched: PendingStep, whole: bool) -> int | None:
        """Take a step, and write down the one before.

        Args:
            launched: the step.
            whole: whether this one is written down too, because the loop is interrupted after it.

        Returns:
            The signal that ends the run after this step, the same for all processes; all is then written down.

        Raises:
            UserError: a step was not finite, or the disk is full.
        """
        self._open.append(launched)
        self._settle(self._ahead)
        if whole or self.signal() is not None:
            self._settle(0)
        return self.signal()

    def signal(self) -> int | None:
        """The signal that ends the run. Of several processes all stop when the first that was asked is read."""
        if self._run.accelerator.num_processes == 1:
            return stopping.received_signal()
        return (stopping.received_signal() or stopping.SIGNALS[0]) if self._asked else None

    def _settle(self, left: int) -> None:
        """Read and write down all steps but the last few.

        Args:
            left: how many.
        """
        while len(self._open) > left:
            self._write(self._open.popleft())

    def _write(self, launched: PendingStep) -> None:
        run = self._run
        loss, norm, asked = launched.read()
        self._asked = self._asked or asked > 0
        run.seconds.append(launched.seconds)
        run.to_first_step = run.to_first_step or launched.finished - run.started
        if not run.watch.passes(launched, loss, norm) or not run.main:
            return
        done = launched.step + 1
        row = {"loss": loss, "lr": launched.lr, "seconds": round(launched.seconds, 6), "grad_norm": norm}
        epoch = launched.step // run.prepared.plan.steps_per_epoch
        append_metrics(run.folder, {"step": done, "epoch": epoch, **row})
        run.trackers.scalars(done, row)
        self._line.update(done, loss, launched.seconds)
