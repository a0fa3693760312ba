"""A run that is set up, and what it does beside its steps: save, evaluate, draw."""

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
    """A run that is set up: everything the loop needs.

    Args:
        config: as the user gave it.
        folder: the run's folder.
        accelerator: knows processes and device.
        device: which device and why, in words.
        stages: time and memory so far.
        prepared: plan and caches.
        transformer: the model with its adapter, not wrapped.
        core: the step core.
        average: of the trained weights, if one is kept: what is drawn, evaluated and exported.
        start: steps done before.
        steps: steps of the whole run.
        total: parameters of the base model.
        attention: the kernel that computes it.
        attempt: the record of this process.
        guard: against NaN and infinity.
        predicted: its memory, if it was predicted.
        to_first_step: seconds from the start to the end of the first step done by this process.
        failed: (what, kind of error) of what the run can do without.
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
        """Whether this process writes."""
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
            )
            checkpoint.save(self.folder, state)
        self.attempt.update()

    def optional(self, what: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Do what a run can do without: a failure is a warning, once of each kind, and None; the next time it is tried
        again. What it held on the device is given back."""
        try:
            return call(*arguments)
        except Exception as error:  # whatever it is: a look at the run is not worth the run
            reason = " ".join(str(error).split())[:300] or "no reason given"
            failed, kind = f"{what} failed ({type(error).__name__}: {reason})", (what, type(error))
        free_memory(self.accelerator.device)
        if kind not in self.failed:
            self.failed.add(kind)
            self.trackers.warn(f"{failed}: the training goes on")
        return None

    def validate(self, step: int) -> None:
        """Draw the validation pictures; at step 0 those of the base."""
        with self.stages.stage("validate"), averaged(self.average):
            if step == 0:
                self.previews.draw_base(self.transformer)
                return
            self.previews.draw_tuned(self.transformer, step)
            sheet = self.previews.write_grid()
        if sheet is not None:
            self.trackers.picture(step, "samples", Image.open(sheet))

    def evaluate(self, step: int) -> float | None:
        """The evaluation loss; kept by step, so that a resumed run knows the first one."""
        with self.stages.stage("validate"), averaged(self.average):
            loss = evaluation_loss(self.transformer, self.core.loss, self.batches, self.config.validation.eval_samples)
        if loss is not None:
            put_evaluation(self.folder, {"step": step, "eval_loss": loss})
            failpoint("validation.evaluated")
            self.trackers.scalars(step, {scalar_name(self.prepared.plan): loss})
        return loss

    @property
    def evaluated_on(self) -> Json:
        """What the evaluation loss is of."""
        return evaluated_on(self.prepared.plan, self.config.validation.eval_samples)

    def evaluate_and_draw(self, step: int) -> None:
        """Evaluate and draw in the course of training."""
        self.optional(EVALUATING, self.evaluate, step)
        self.optional(DRAWING, self.validate, step)
        self.attempt.update()

    def progress(self) -> TrainingProgress:
        """What a person sees of the loop."""
        samples, first = self.prepared.plan.samples_per_step, self.stages.by_name.get("validate")
        every = {"save": self.config.checkpoint.every, "validate": self.config.validation.every}
        took = {"validate": first.seconds} if first else {}
        progress = TrainingProgress(self.steps, self.start, samples, self.stages.memory_now, every, took)
        if not self.previews.requests:
            progress.look = "evaluation" if self.config.validation.eval_samples else ""
        return progress

    def is_validated(self, step: int) -> bool:
        """Whether evaluation and pictures after ``step`` steps are there, as far as they are asked for."""
        evaluated = not self.config.validation.eval_samples or was_evaluated(self.folder, step)
        return evaluated and self.previews.has_drawn(step)
