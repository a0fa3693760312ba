"""Evaluate and generate before, during and after training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image

from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import has_start, is_due, is_validation_due, loss_name
from simpletune.engine.optim.ema import use_average
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import EVALUATION, EVALUATIONS, read_rows, record_validation
from simpletune.runs.repair import is_start
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.options import Json
from simpletune.system.printable import describe_exception
from simpletune.system.stage_timer import StageTimer
from simpletune.training.trackers import Trackers
from simpletune.training.validation_images import Previews
from simpletune.training.validation_loss import LossEvaluator

ONE_STEP = "the loss of one step by each objective"
EVALUATING, GENERATING = "the validation loss", "drawing validation pictures"
GENERATING_BASE = "drawing the base's validation pictures"
T = TypeVar("T")


class OptionalTasks:
    """Runs tasks; on failure, warns once per kind of error, and frees the task's device memory."""

    def __init__(self, device: torch.device, warn: Callable[[str], None]):
        self.device, self.warn = device, warn
        self._failed: set[tuple[str, type]] = set()

    def run(self, what: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Return what the task returns; None if it fails. It is tried again the next time."""
        try:
            return call(*arguments)
        except Exception as error:  # an optional task must not fail the run
            failed, kind = f"{what} failed ({describe_exception(error)})", (what, type(error))
        free_memory(self.device)  # here, because the error's traceback refers to the task's tensors
        if kind not in self._failed:
            self._failed.add(kind)
            self.warn(f"{failed}; training continues")
        return None


class Validator:
    """Computes the validation loss and generates the validation pictures when due; a failure is only a warning.

    Args:
        config: configuration as the user gave it.
        samples: number of samples of an evaluation.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        core: TrainStep,
        batches: BatchLoader,
        prepared: PreparedData,
        samples: int,
        stages: StageTimer,
        attempt: AttemptRecorder,
        trackers: Trackers,
        tasks: OptionalTasks,
    ):
        self.config = config
        self.folder = folder
        self.core = core
        self.plan = prepared.plan
        self.stages = stages
        self.attempt = attempt
        self.trackers = trackers
        self.tasks = tasks
        self.has_start = has_start(config)
        self.evaluator = LossEvaluator(core, batches, config.adapter, folder, samples)
        self.previews = Previews(core.config, prepared.requests, prepared.text, folder / "samples", core)

    @property
    def evaluated_on(self) -> Json:
        """Describe what the validation loss measures."""
        held_out = len(self.plan.held_out)
        name = loss_name(min(self.evaluator.samples, held_out), held_out)
        return {"eval_loss_is": name, "held_out_pictures": held_out}

    def before_training(self, start: int, steps: int) -> None:
        """Evaluate and generate before the first step of this process, if that is still to be done."""
        if start == 0:
            if self.evaluator.samples and len(self.config.model.objectives) > 1:
                self.tasks.run(ONE_STEP, self.say_one_step_losses)
            before = self.try_to_evaluate(0)
            write_json(self.folder / EVALUATION, {"eval_loss": before, **self.evaluated_on})
            if self.has_start:
                self.tasks.run(EVALUATING, self.evaluate, 0, True)
            self.try_to_generate(0)
            return
        if not (self.folder / EVALUATION).is_file():  # set aside because it had changed
            rows = read_rows(self.folder / EVALUATIONS)
            first = next((row for row in rows if row["step"] == 0 and not is_start(row)), None)
            if first is not None:
                write_json(self.folder / EVALUATION, {"eval_loss": first["eval_loss"], **self.evaluated_on})
        if start < steps:
            self.after_step(start)  # if the run was stopped while evaluating or generating

    def after_step(self, step: int) -> None:
        """Evaluate and generate if due after ``step`` steps; skips what a stopped run has already done."""
        if self.evaluator.samples and is_validation_due(self.config, step):
            if not any(row["step"] == step for row in read_rows(self.folder / EVALUATIONS)):
                self.try_to_evaluate(step)
        generated = not self.previews.requests or self.previews.folder_of(step).is_dir()
        if is_due(self.config.validation.every, step) and not generated:
            self.try_to_generate(step)
        self.attempt.update()

    def try_to_evaluate(self, step: int) -> float | None:
        """Evaluate; None if there are no samples, or with a warning if it fails."""
        return self.tasks.run(EVALUATING, self.evaluate, step)

    def try_to_generate(self, step: int) -> None:
        """Generate the validation pictures, the base's too if they are not there, and the sheet of all."""
        self.tasks.run(GENERATING_BASE, self.generate_base, step)
        if step or self.has_start:
            self.tasks.run(GENERATING, self.generate, step)

    def say_one_step_losses(self) -> None:
        """Print the base's loss of one step by each objective, without a verdict."""
        with self.stages.stage("validate"):
            found = self.evaluator.one_step_losses(self.core.denoiser)
        listed = ", ".join(f"{loss:.3f} by {name}" for name, loss in found.items())
        say(f"base    loss of one step at half the noise: {listed} (the run trains by {self.config.objective.name})")

    def evaluate(self, step: int, start: bool = False) -> float | None:
        """Compute the validation loss and the drift, and record them by step; at step 0 the base's, or with ``start``
        those of the LoRA that training begins with."""
        with self.stages.stage("validate"), use_average(self.core.average):
            evaluator, denoiser = self.evaluator, self.core.denoiser
            found = evaluator.evaluate_start(denoiser) if start else evaluator.evaluate(denoiser, step)
        if found is None:
            return None
        of = {"step": step, **({"start": True} if start else {})}
        record_validation(self.folder, {**of, **found.row(), "held_out": bool(self.plan.held_out)})
        if step == 0 and self.has_start and not start:
            return found.loss  # the trackers' curves begin at the start
        drift = {f"drift_{group}": value for group, value in found.drift.items()}
        # In trackers, runs with and without a split must not share a curve.
        name = "validation_loss" if self.plan.held_out else "training_loss_fixed_noise"
        self.trackers.scalars(step, {name: found.loss, **drift})
        return found.loss

    def generate_base(self, step: int) -> None:
        with self.stages.stage("validate"):
            self.previews.generate_base(self.core.denoiser, step)

    def generate(self, step: int) -> None:
        with self.stages.stage("validate"), use_average(self.core.average):
            self.previews.generate(self.core.denoiser, step)
            sheets = {"samples": self.previews.write_grid(), "strengths": self.previews.write_strip(step)}
        for name, sheet in sheets.items():
            if sheet is not None:
                self.trackers.image(step, name, Image.open(sheet))
