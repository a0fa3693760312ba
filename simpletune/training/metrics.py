"""Log each step's loss, gradient norm and times to the metrics file, the trackers and the progress line."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import append_metrics
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.console import TrainingProgress
from simpletune.system.options import plural
from simpletune.training.nonfinite import NonFiniteGuard
from simpletune.training.pending_steps import DeviceEvent, InterruptFlags, PendingStep, global_figures
from simpletune.training.slow_steps import SlowSteps
from simpletune.training.trackers import Trackers

NOTHING = 1e-12  # a loss or a gradient's norm that moves no weight: optimizers divide by 1e-8 at least
IDLE = 10  # steps after which a run that trains nothing is warned of


class Metrics:
    """Checks and logs steps once the device has finished them.

    The host stays one step ahead of the device: it launches a step before it reads the figures of the previous one.
    With ``train.on_nonfinite`` ``skip`` it waits for every step anyway.
    """

    def __init__(
        self,
        folder: Path,
        core: TrainStep,
        guard: NonFiniteGuard,
        attempt: AttemptRecorder,
        trackers: Trackers,
        steps_per_epoch: int,
    ):
        self.folder = folder
        self.core = core
        self.guard = guard
        self.attempt = attempt
        self.trackers = trackers
        self.steps_per_epoch = steps_per_epoch
        self.main: bool = core.accelerator.is_main_process
        self.to_first_step: float | None = None
        """Seconds from the start to the end of this process's first step."""
        self.idle: int | None = 0
        """Steps so far, as long as none of them had a loss and a gradient."""
        self._pending: deque[PendingStep] = deque()
        self._ahead = 0 if guard.skips else 1
        self.slow = SlowSteps(core.device)

    def record_launch(
        self,
        step: int,
        began: DeviceEvent,
        loss: Tensor,
        norm: Tensor,
        asked: InterruptFlags,
        waited: float | None,
        batches: Sequence[Batch],
        fetched: float,
    ) -> None:
        """Start copying the figures of the step that the core launched last to the host (``PendingStep``); ``asked`` is
        what is asked of this process, ``fetched`` the seconds until it had the ``batches``."""
        figures = global_figures(loss, norm, self.core, asked)
        shapes = tuple(batch.z_0.shape for batch in batches)
        self._pending.append(PendingStep.launch(step, began, self.core, figures, waited, shapes, fetched))

    def log(self, progress: TrainingProgress, everything: bool) -> InterruptFlags:
        """Log the steps that are due; with ``everything`` all, which waits for the device.

        Returns:
            What any process was asked when these steps were launched.

        Raises:
            UserError: a step was non-finite, or the disk is full.
        """
        stop = answer = False
        while len(self._pending) > (0 if everything else self._ahead):
            done = self._pending.popleft()
            loss, norm, asked, fp16 = done.read()
            stop, answer = stop or asked.stop, answer or asked.answer
            seconds = done.ended.since(done.began)  # on the device, from the end of the previous step
            self.to_first_step = self.to_first_step or done.began.clock + seconds - self.attempt.began
            if not (self.guard.check(done, loss, norm, fp16) and self.main):
                continue
            row = {"loss": loss, "lr": done.lr, "seconds": round(seconds, 6), "grad_norm": norm}
            if fp16:
                row["loss_scale"] = fp16[0]
            if done.waited is not None:
                row["waited"] = round(done.waited, 6)
            append_metrics(self.folder, {"step": done.step + 1, "epoch": done.step // self.steps_per_epoch, **row})
            self.attempt.last_step = done.step + 1
            if self.idle is not None:
                self.idle = self.idle + 1 if min(abs(loss), norm) < NOTHING else None
            if self.idle == IDLE:
                self.warn_if_idle()
            self.trackers.scalars(done.step + 1, row)
            progress.update(done.step + 1, loss, seconds)
            if slow := self.slow.see(seconds - done.fetched, done.shapes):
                self.trackers.warn(slow)
        return InterruptFlags(stop, answer)

    def warn_if_idle(self) -> None:
        """Warn if nothing has been trained in any step of this process."""
        if self.idle:
            self.trackers.warn(
                f"{plural(self.idle, 'step')} trained nothing: the loss or its gradient is 0 in each. Look at the "
                "weights of levels (objective), adapter.alpha and masks; `simpletune check` names settings that do it"
            )
        self.idle = None
