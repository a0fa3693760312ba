"""Hold the state of a run, and save, evaluate and draw between its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from accelerate import Accelerator
from PIL import Image

from simpletune.config.schema import TrainConfig
from simpletune.data.evaluation import evaluated_on, scalar_name
from simpletune.ema import Average, averaged
from simpletune.options import Json
from simpletune.pipeline.encode import Prepared, free_memory
from simpletune.printable import reason_of
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import (
    put_evaluation,
    was_evaluated,
)
from simpletune.step.batches import Batches
from simpletune.step.core import StepCore
from simpletune.system.console import TrainingProgress
from simpletune.system.failpoints import failpoint
from simpletune.system.stage_timer import StageTimer
from simpletune.tensors import trained_parameters
from simpletune.training.nonfinite import NonFiniteGuard, require_finite
from simpletune.training.trackers import Trackers
from simpletune.training.validation import Previews, evaluation_loss

if TYPE_CHECKING:
    from simpletune.estimate.predict import Estimate
    from simpletune.models.transformer import Transformer

T = TypeVar("T")

EVALUATING, DRAWING = "the evaluation loss", "drawing validation pictures"


@dataclass
class Run:
    """Hold everything that the training loop needs.

    Args:
        config: configuration as the user gave it.
        folder: run folder.
        accelerator: accelerate's view of processes and device.
        device: description of the device and why it was chosen.
        stages: time and memory so far.
        prepared: plan and caches.
        transformer: model with its adapter, not wrapped.
        core: step core.
        average: average of the trained weights to draw, evaluate and export, if enabled.
        start: first step of this process.
        steps: number of steps of the whole run.
        total: number of parameters of the base model.
        attention: attention kernel.
        attempt: record of this process.
        guard: check for NaN and infinity.
        predicted: predicted memory, if any.
        to_first_step: seconds from the start to the end of this process's first step.
        failed: optional tasks that failed, with the type of error.
    """

    config: TrainConfig
    folder: Path
    accelerator: Accelerator
    device: str
    stages: StageTimer
    prepared: Prepared
    transformer: Transformer
    core: StepCore
    batches: Batches
    average: Average | None
    previews: Previews
    trackers: Trackers
    start: int
    steps: int
    total: int
    attention: str
    attempt: AttemptRecorder
    guard: NonFiniteGuard
    predicted: Estimate | None = None
    to_first_step: float | None = None
    failed: set[tuple[str, type]] = field(default_factory=set)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.accelerator.is_main_process

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        with self.stages.stage("save"):
            require_finite(trained_parameters(self.transformer), self.folder, step)
            state = checkpoint.TrainingState(
                step=step,
                config=self.config,
                model=self.transformer,
                optimizer=self.core.optimizer,
                manifest=self.prepared.plan.manifest(),
                average=self.average,
                processes=self.accelerator.num_processes,
                fp16=None if self.core.fp16 is None else self.core.fp16.state(),
            )
            checkpoint.save(self.folder, state)
        self.attempt.update()

    def optional(self, what: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Run an optional task: on failure, warn once per kind of error, free its device memory and return None. The
        task is tried again the next time."""
        try:
            return call(*arguments)
        except Exception as error:  # no optional task may fail a run
            failed, kind = f"{what} failed ({reason_of(error)})", (what, type(error))
        free_memory(self.accelerator.device)
        if kind not in self.failed:
            self.failed.add(kind)
            self.trackers.warn(f"{failed}; training continues")
        return None

    def validate(self, step: int) -> None:
        """Draw the validation pictures; at step 0, with the base model."""
        with self.stages.stage("validate"), averaged(self.average):
            if step == 0:
                self.previews.draw_base(self.transformer)
                return
            self.previews.draw_tuned(self.transformer, step)
            sheet = self.previews.write_grid()
        if sheet is not None:
            self.trackers.picture(step, "samples", Image.open(sheet))

    def evaluate(self, step: int) -> float | None:
        """Compute the evaluation loss, and record it by step for resumed runs."""
        with self.stages.stage("validate"), averaged(self.average):
            loss = evaluation_loss(self.transformer, self.core.loss, self.batches, self.config.validation.eval_samples)
        if loss is not None:
            put_evaluation(self.folder, {"step": step, "eval_loss": loss})
            failpoint("validation.evaluated")
            self.trackers.scalars(step, {scalar_name(self.prepared.plan): loss})
        return loss

    @property
    def evaluated_on(self) -> Json:
        """Describe what the evaluation loss measures."""
        return evaluated_on(self.prepared.plan, self.config.validation.eval_samples)

    def evaluate_and_draw(self, step: int) -> None:
        """Evaluate and draw during training."""
        self.optional(EVALUATING, self.evaluate, step)
        self.optional(DRAWING, self.validate, step)
        self.attempt.update()

    def progress(self) -> TrainingProgress:
        """Create the progress display of the loop."""
        samples, first = self.prepared.plan.samples_per_step, self.stages.by_name.get("validate")
        every = {"save": self.config.checkpoint.every, "validate": self.config.validation.every}
        took = {"validate": first.seconds} if first else {}
        progress = TrainingProgress(self.steps, self.start, samples, self.stages.memory_now, every, took)
        if not self.previews.requests:
            progress.look = "evaluation" if self.config.validation.eval_samples else ""
        return progress

    def is_validated(self, step: int) -> bool:
        """Tell whether the evaluation and pictures after ``step`` steps exist, if enabled."""
        evaluated = not self.config.validation.eval_samples or was_evaluated(self.folder, step)
        return evaluated and self.previews.has_drawn(step)
