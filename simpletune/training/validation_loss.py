"""Evaluate a model during training on fixed (picture, noise level, noise) samples: the loss, and the drift from the
base.

Shapes: n samples; a prediction is [1, c, h, w], with the latent's channels, height and width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from pydantic import TypeAdapter
from torch import Tensor

from simpletune.adapters.methods.adapter import TrainingMethod
from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import TRAINED, drift_groups, standard_error
from simpletune.data.samples import PlannedSample
from simpletune.engine.denoiser import Denoiser
from simpletune.engine.fp16_blocks import finite_passes
from simpletune.models.objectives import Objective
from simpletune.models.objectives.objective import TrainingObjective
from simpletune.runs.folder import DRIFT
from simpletune.runs.repair import CHANGED, set_aside
from simpletune.stages.step.batch_loader import Batch, BatchLoader
from simpletune.stages.step.train_step import TrainStep
from simpletune.stages.step.variant import restore_base
from simpletune.system.console import detail, progress
from simpletune.system.disk import room_for
from simpletune.system.options import Json, UserError
from simpletune.system.safetensors_file import WeightReader, content_hash, read_header, write_safetensors
from simpletune.system.signals import poll

HASH = "sha256"  # in the header of the base's predictions


@dataclass(frozen=True)
class ValidationFigures:
    """The figures of one evaluation."""

    loss: float  # the mean
    losses: list[float]  # of each sample [n], to compare evaluations sample by sample
    drift: dict[str, float] = field(default_factory=dict)
    """``E|v - v_base|^2 / E|v_base|^2`` by group of prompts; empty if the base is unknown, and without a group for
    which the base predicts zeros and the model does not."""
    drift_error: dict[str, float] = field(default_factory=dict)
    """Their standard errors over the samples."""

    def row(self) -> Json:
        """Return the figures as recorded: six digits, except for the loss."""
        found: Json = {"eval_loss": self.loss, "eval_losses": list(map(_short, self.losses))}
        if self.drift:
            found["drift"] = {group: _short(value) for group, value in self.drift.items()}
            found["drift_error"] = {group: _short(value) for group, value in self.drift_error.items()}
        return found


class LossEvaluator:
    """Evaluates a model, always on the same samples.

    The base's predictions are computed before the first step, or with the adapter off, and kept in the run's folder in
    their own type, so drift costs no second pass, and works for full fine-tuning, too.
    """

    def __init__(self, core: TrainStep, batches: BatchLoader, adapter: TrainingMethod, folder: Path, samples: int):
        self.core, self.batches, self.adapter, self.file = core, batches, adapter, folder / DRIFT
        self.samples = samples

    def evaluate(self, denoiser: Denoiser, step: int) -> ValidationFigures | None:
        """Evaluate the unwrapped model after ``step`` steps, 0: the base; None if there are no samples."""
        return self._evaluate(denoiser, self._write_base if step == 0 else self._compare_with_base)

    def evaluate_start(self, denoiser: Denoiser) -> ValidationFigures | None:
        """Evaluate the LoRA that training begins with."""
        return self._evaluate(denoiser, self._compare_with_base)

    @torch.no_grad()
    def _evaluate(
        self, denoiser: Denoiser, figures: Callable[[Denoiser], ValidationFigures]
    ) -> ValidationFigures | None:
        if not self.samples:
            return None
        was_training = denoiser.training
        denoiser.eval()
        try:
            return figures(denoiser)
        finally:
            denoiser.train(was_training)

    @torch.no_grad()
    def one_step_losses(self, denoiser: Denoiser) -> dict[str, float]:
        """Return the base's mean squared error for the first sample, in the middle of the noise levels, by each
        objective that its family can be trained with: no file tells which the base was trained with."""
        core, model = self.core, self.core.config.model
        batch = next(iter(self.batches.single_batches(self.batches.plan.evaluation(1))))
        objectives = [core.config.objective, *objectives_beside(core.config)]
        found: dict[str, float] = {}
        was_training, own = denoiser.training, core.plain.process
        denoiser.eval()
        try:
            for objective in objectives:
                if list(objective.problems(model.files.scheduler_config, model.flow)):
                    continue  # the base's scheduler says that it is not this one
                process = objective.process(model.files.scheduler_config, model.flow)
                middle = replace(batch, level=torch.full_like(batch.level, objective.quantile(0.5, 1.0)))

                def predict(middle: Batch = middle) -> Tensor:
                    return core.variant.predict(denoiser, middle)

                core.plain.process = process
                with nullcontext() if self.adapter.trains_base else restore_base(self.adapter, denoiser):
                    prediction = finite_passes(denoiser, predict)
                target = process.target(middle.z_0, middle.noise, middle.level)
                found[objective.name] = (prediction.float() - target).square().mean().item()
        finally:
            core.plain.process = own
            denoiser.train(was_training)
        return found

    def _compare_with_base(self, denoiser: Denoiser) -> ValidationFigures:
        base = self._base(denoiser)
        return finite_passes(denoiser, lambda: self._compare(denoiser, base))

    @cached_property
    def groups(self) -> dict[str, list[PlannedSample]]:
        """The samples of each group of prompts."""
        return drift_groups(self.core.config.validation, self.batches.plan.evaluation(self.samples))

    def _base(self, denoiser: Denoiser) -> dict[str, Tensor] | None:
        """Load the base's predictions by group and number; None if they are lost and the base itself is trained."""
        # Those of another start differ if a prompt or the number of samples has changed.
        if not self._is_known():
            if self.adapter.trains_base:
                return None
            self._write_base(denoiser)
        return WeightReader([self.file]).get_all()

    def _is_known(self) -> bool:
        """Return whether the stored predictions are those of these samples; damaged ones are set aside."""
        if not self.file.is_file():
            return False
        try:
            about = read_header(self.file).get("__metadata__", {})
            sound = HASH not in about or about[HASH] == content_hash(self.file)
        except UserError:
            sound = False
        if not sound:
            set_aside(self.file, CHANGED)
            return False
        return bool(about.get("of") == self._identity())

    def _identity(self) -> str:
        """Return what the predictions depend on besides the base and the latents: samples and prompts."""
        groups = self.groups.items()
        return json.dumps(
            {group: [[d.view.image.digest, d.caption, d.level] for d in samples] for group, samples in groups}
        )

    def _write_base(self, denoiser: Denoiser) -> ValidationFigures:
        """Predict with the base, store the predictions, and return the figures."""

        def predict() -> tuple[dict[str, Tensor], list[Tensor]]:  # repeated if a block overflows fp16
            found, losses = dict[str, Tensor](), list[Tensor]()
            for group, n, prediction, loss in self._passes(denoiser, self.groups):
                found[f"{group}.{n}"] = prediction.cpu()
                losses.extend([loss] if group == TRAINED else [])
            return found, losses

        with nullcontext() if self.adapter.trains_base else restore_base(self.adapter, denoiser):
            found, losses = finite_passes(denoiser, predict)
        with room_for("writing the base's predictions", self.file.parent):
            write_safetensors(found, self.file, {"of": self._identity()}, HASH)
        none = dict.fromkeys(self.groups, 0.0)
        return ValidationFigures(*_mean_and_each(losses), none, none)

    def _passes(
        self, denoiser: Denoiser, groups: Mapping[str, list[PlannedSample]]
    ) -> Iterator[tuple[str, int, Tensor, Tensor]]:
        """Yield the group, the number in it, the prediction and the loss [] of each sample."""
        with progress("evaluating", sum(map(len, groups.values())), "samples", detail) as advance:
            for group, samples in groups.items():
                for n, batch in enumerate(self.batches.single_batches(samples)):
                    poll()
                    prediction = self.core.variant.predict(denoiser, batch)
                    yield group, n, prediction, self.core.variant.loss(prediction, batch)
                    advance()

    def _compare(self, denoiser: Denoiser, base: dict[str, Tensor] | None) -> ValidationFigures:
        losses: list[Tensor] = []
        change: dict[str, list[Tensor]] = {}
        groups = self.groups if base is not None else {TRAINED: self.groups[TRAINED]}
        for group, n, prediction, loss in self._passes(denoiser, groups):
            if group == TRAINED:
                losses.append(loss)
            if base is not None:
                before = base[f"{group}.{n}"].to(prediction.device, non_blocking=True).float()
                pair = (prediction.float() - before).square().mean(), before.square().mean()
                change.setdefault(group, []).append(torch.stack(pair))
        found = {group: _relative(torch.stack(pairs).tolist()) for group, pairs in change.items()}
        drift = {group: values for group, values in found.items() if values is not None}
        return ValidationFigures(
            *_mean_and_each(losses),
            {group: fmean(values) for group, values in drift.items()},
            {group: standard_error(values) for group, values in drift.items()},
        )


def objectives_beside(config: TrainConfig) -> list[TrainingObjective]:
    """Return the objectives, with their defaults, that models of the base's family can be trained with instead."""
    others = (name for name in config.model.objectives if name != config.objective.name)
    return [TypeAdapter[TrainingObjective](Objective).validate_python({"name": name}) for name in others]


def _mean_and_each(losses: list[Tensor]) -> tuple[float, list[float]]:
    return torch.stack(losses).mean().item(), torch.stack(losses).tolist()


def _relative(pairs: list[list[float]]) -> list[float] | None:
    """Divide each sample's squared change by the mean square of the base's predictions; their mean is the drift."""
    scale = fmean(square for _, square in pairs)
    if scale == 0:  # as with an output layer that starts at zero: no change is a drift of 0, another no multiple
        return None if any(change for change, _ in pairs) else [0.0] * len(pairs)
    return [change / scale for change, _ in pairs]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
