"""Hold the state of a run, and save, evaluate and draw between its steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from accelerate import Accelerator
from PIL import Image

from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import describe_validation, is_validation_due, scalar_name
from simpletune.engine.fsdp.fsdp_model import held_parameters
from simpletune.engine.fsdp.rank_zero import rank_zero_driver
from simpletune.engine.optim.ema import Average, use_average
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import PLANNED, has_validation, record_validation
from simpletune.runs.remote.checkpoint_store import CheckpointStore
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.atomic import write_json
from simpletune.system.console import TrainingProgress, say
from simpletune.system.options import Json, plural
from simpletune.system.printable import describe_exception
from simpletune.system.stage_timer import StageTimer
from simpletune.training.control import Control
from simpletune.training.nonfinite import NonFiniteGuard, finite_only, require_finite
from simpletune.training.trackers import Trackers
from simpletune.training.validation_loss import LossEvaluator, validation_samples
from simpletune.training.validation_pictures import Previews

if TYPE_CHECKING:
    from simpletune.estimate.job_estimate import Estimate
    from simpletune.models.shared.denoiser import Denoiser

T = TypeVar("T")

EVALUATING, DRAWING = "the validation loss", "drawing validation pictures"


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
        store: keeps the run's checkpoints, if an object store does.
        predicted: predicted memory, if any.
        to_first_step: seconds from the start to the end of this process's first step.
        early: why the run ended before its planned length, if it did.
        failed: optional tasks that failed, with the type of error.
    """

    config: TrainConfig
    folder: Path
    accelerator: Accelerator
    device: str
    stages: StageTimer
    prepared: PreparedData
    denoiser: Denoiser
    core: TrainStep
    batches: BatchLoader
    average: Average | None
    previews: Previews
    trackers: Trackers
    start: int
    steps: int
    total: int
    attention: str
    attempt: AttemptRecorder
    guard: NonFiniteGuard
    store: CheckpointStore
    predicted: Estimate | None = None
    to_first_step: float | None = None
    early: str | None = None
    failed: set[tuple[str, type]] = field(default_factory=set)
    evaluator: LossEvaluator = field(init=False)
    control: Control = field(init=False)

    def __post_init__(self) -> None:
        """Choose the evaluation samples, record the plan, and start watching the control file."""
        if self.main:
            plan = {"steps": self.steps, "steps_per_epoch": self.prepared.plan.steps_per_epoch}
            predicted = {"predicted": self.predicted.as_json()["stages"]} if self.predicted is not None else {}
            write_json(self.folder / PLANNED, plan | predicted)
        self.store.begins(self.start)
        alone = self.accelerator.num_processes == 1
        self.control = Control(self.folder, self.attempt, self.trackers.warn, alone) if self.main else Control()
        pace = self.prepared.plan.samples_per_step
        samples = validation_samples(self.config, pace, self.steps, resumed=self.start > 0)
        self.evaluator = LossEvaluator(self.core, self.batches, self.config.adapter, self.folder, samples)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.accelerator.is_main_process

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        with self.stages.stage("save"), finite_only(self.folder, step):
            require_finite(held_parameters(self.denoiser), self.folder, step)
            checkpoint.save_checkpoint(self.folder, self.state(step))
        self.attempt.update()
        self.store.saved(step)

    def state(self, step: int) -> checkpoint.TrainingState:
        """Return what a checkpoint saves."""
        return checkpoint.TrainingState(
            step=step,
            config=self.config,
            model=self.denoiser,
            optimizer=self.core.optimizer,
            manifest=self.prepared.plan.manifest(),
            average=self.average,
            processes=self.accelerator.num_processes,
            fp16=None if self.core.fp16 is None else self.core.fp16.state(),
        )

    def first_alone(self, work: Callable[..., object], *arguments: object) -> None:
        """Let the first process work alone between two steps. If the weights are sharded, the others help it."""
        leading = rank_zero_driver(self.denoiser)
        if not self.main:
            if leading is not None:
                leading.follow(self.average, lambda step: checkpoint.save_own_part(self.folder, self.state(step)))
            return
        with nullcontext() if leading is None else leading.lead():
            work(*arguments)

    def optional(self, what: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Run an optional task: on failure, warn once per kind of error, free its device memory and return None. The
        task is retried the next time."""
        try:
            return call(*arguments)
        except Exception as error:  # an optional task must not fail the run
            failed, kind = f"{what} failed ({describe_exception(error)})", (what, type(error))
        free_memory(self.accelerator.device)
        if kind not in self.failed:
            self.failed.add(kind)
            self.trackers.warn(f"{failed}; training continues")
        return None

    def validate(self, step: int) -> None:
        """Draw the validation pictures; at step 0, with the base model."""
        with self.stages.stage("validate"), use_average(self.average):
            if step == 0:
                self.previews.generate_base(self.denoiser)
                return
            self.previews.generate_tuned(self.denoiser, step)
            sheet = self.previews.write_grid()
        if sheet is not None:
            self.trackers.picture(step, "samples", Image.open(sheet))

    def evaluate(self, step: int) -> float | None:
        """Compute the validation loss and the drift, and record them by step."""
        with self.stages.stage("validate"), use_average(self.average):
            found = self.evaluator.evaluate(self.denoiser, step)
        if found is None:
            return None
        held_out = bool(self.prepared.plan.held_out)
        record_validation(self.folder, {"step": step, **found.row(), "held_out": held_out})
        drift = {f"drift_{group}": value for group, value in found.drift.items()}
        self.trackers.scalars(step, {scalar_name(self.prepared.plan): found.loss, **drift})
        return found.loss

    @property
    def evaluated_on(self) -> Json:
        """Describe what the validation loss measures."""
        return describe_validation(self.prepared.plan, self.evaluator.samples)

    def look(self, step: int) -> None:
        """Evaluate, and draw if due, during training; skips what a stopped run has already done."""
        if is_validation_due(self.config, step) and not self.is_evaluated(step):
            self.optional(EVALUATING, self.evaluate, step)
        if due(self.config.validation.every, step) and not self.previews.has_pictures(step):
            self.optional(DRAWING, self.validate, step)
        self.attempt.update()

    def stop_at(self, step: int) -> None:
        """End the run after ``step`` steps, before its planned length."""
        option = self.config.validation.early_stop
        assert option is not None
        without = plural(option.patience, "evaluation")
        self.early = f"stopped early at step {step} of {self.steps}: no lower validation loss in {without}"
        if self.main:
            say(self.early)
        self.steps = step

    def progress(self) -> TrainingProgress:
        """Create the progress display of the loop."""
        samples, first = self.prepared.plan.samples_per_step, self.stages.by_name.get("validate")
        every = {"save": self.config.checkpoint.every, "validate": self.config.validation.every}
        took = {"validate": first.seconds} if first else {}
        progress = TrainingProgress(self.steps, self.start, samples, self.stages.memory_now, every, took)
        if not self.previews.requests:
            progress.look = "evaluation" if self.evaluator.samples else ""
        return progress

    def is_evaluated(self, step: int) -> bool:
        """Return whether the evaluation after ``step`` steps is recorded or disabled."""
        return not self.evaluator.samples or has_validation(self.folder, step)


def due(every: int | None, step: int) -> bool:
    """Return whether something with period ``every`` is due after ``step`` steps."""
    return every is not None and step % every == 0
