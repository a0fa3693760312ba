"""A training run, set up: device, data, caches, folder, model, and what saves, draws and evaluates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from PIL import Image
from torch import nn

from simpletune.config.resolve import require_model_rules, resolved
from simpletune.config.schema import TrainConfig, cache_of_bases, run_folder
from simpletune.data.plan import Plan
from simpletune.ema import Average, averaged
from simpletune.estimate.disk_needs import require_room
from simpletune.options import UserError
from simpletune.pipeline.encode import Prepared, free_memory, prepare
from simpletune.pipeline.load import load_base
from simpletune.runs import checkpoint
from simpletune.runs.folder import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    chosen_blocks,
    clear_unsaved,
    finished_steps,
    open_again,
    open_fresh,
    put_chosen_blocks,
    put_evaluation,
    was_evaluated,
)
from simpletune.runs.resume import check_resumable
from simpletune.runs.summary import print_data
from simpletune.step.attention import settle_attention
from simpletune.step.batches import Batches
from simpletune.step.core import StepCore, assemble
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.devices import choose_device
from simpletune.system.environment import describe_machine
from simpletune.system.failpoints import failpoint
from simpletune.system.signals import stop_if_asked
from simpletune.system.stage_timer import StageTimer
from simpletune.tensors import trained_parameters
from simpletune.training.nonfinite import NonFiniteGuard, require_finite
from simpletune.training.trackers import Trackers, open_trackers
from simpletune.training.validation import Previews, evaluation_loss

if TYPE_CHECKING:
    from simpletune.estimate.job import Estimate

T = TypeVar("T")

EVALUATING, DRAWING = "the evaluation loss", "drawing validation pictures"
PATIENCE = timedelta(days=2)  # of the others while one process fills the cache or draws; NCCL's own: 10 minutes


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
        started: when the process started, by ``time.perf_counter``.
        watch: for NaN and infinity.
        predicted: its memory, if it was predicted.
        seconds: of each step done by this process.
        to_first_step: seconds from the start to the end of the first step done by this process.
        failed: (what, kind of error) of what the run can do without.
    """

    config: TrainConfig
    folder: Path
    accelerator: Accelerator
    device: str
    stages: StageTimer
    prepared: Prepared
    transformer: nn.Module
    core: StepCore
    feed: Batches
    average: Average | None
    previews: Previews
    trackers: Trackers
    start: int
    steps: int
    total: int
    attention: str
    started: float
    watch: NonFiniteGuard
    predicted: Estimate | None = None
    seconds: list[float] = field(default_factory=list)
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

    def optional(self, what: str, call: Callable[..., T], *arguments: Any) -> T | None:
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
            loss = evaluation_loss(self.transformer, self.core.loss, self.feed, self.config.validation.eval_samples)
        if loss is not None:
            put_evaluation(self.folder, {"step": step, "eval_loss": loss})
            failpoint("validation.evaluated")
            self.trackers.scalars(step, {"eval_loss": loss})
        return loss

    def look(self, step: int) -> None:
        """Evaluate and draw in the course of training."""
        self.optional(EVALUATING, self.evaluate, step)
        self.optional(DRAWING, self.validate, step)

    def has_looked(self, step: int) -> bool:
        """Whether evaluation and pictures after ``step`` steps are there, as far as they are asked for."""
        evaluated = not self.config.validation.eval_samples or was_evaluated(self.folder, step)
        return evaluated and self.previews.has_drawn(step)


def set_up(
    config: TrainConfig, resume: str | None, started: float, force: bool = False, estimate_first: bool = False
) -> Run:
    """Everything before the first step: device, data, caches, folder, model.

    Args:
        config: as the user gave it.
        resume: ``latest``, ``auto`` or a checkpoint's folder.
        started: when the process started, by ``time.perf_counter``.
        force: begin even what does not fit on the device, by prediction.
        foresee: predict the memory on the CPU too.

    Raises:
        UserError: for anything that the user can mend.
    """
    accelerator, reason = make_accelerator(config)
    device = accelerator.device
    stages = StageTimer(cuda=device.type == "cuda")
    with accelerator.main_process_first():  # it sets aside what is damaged
        saved = checkpoint.find(resume, run_folder(config)) if resume else None
    precision = config.precision
    say(f"simpletune {config.name} on {reason}: {precision.weights} weights, {precision.describe_matmul()}")
    here = resolved(config)
    require_model_rules(here)
    predicted: list[Estimate] = []
    fitted: list[TrainConfig] = []  # with the number of checkpointed blocks; the run's config keeps auto

    def planned(plan: Plan) -> None:
        if accelerator.is_main_process:
            require_room(here, plan, saved.step if saved else 0, force)
        fitted.append(here)
        if here.memory.checkpointing == "auto":
            from simpletune.estimate.choosing import choose_on

            fitted[0] = choose_on(here, device, plan.largest(), chosen_blocks(config) if saved else None)
        if accelerator.is_main_process and (device.type == "cuda" or estimate_first):
            from simpletune.estimate.forecast import forecast

            predicted.append(forecast(fitted[0], device, plan.largest(), force))

    prepared = prepare(here, accelerator, stages, planned)
    print_data(prepared)
    steps = config.steps(prepared.plan.steps_per_epoch)
    chosen = fitted[0]
    if saved:
        announce_resume(saved, config, prepared, steps, accelerator.num_processes)
    folder = run_folder(config)
    if accelerator.is_main_process:
        open_folder(config, prepared, saved, anew=resume == "auto")
        put_chosen_blocks(here, chosen)
    stop_if_asked()
    with stages.stage("load"):
        transformer = load_base(
            here.model,
            config.memory,
            config.precision,
            device,
            prepared.sizes(),
            config.train.seed,
            cache_of_bases(here),
        )
        failpoint("model.loaded")
        total = here.model.parameter_count()
        core = assemble(chosen, transformer, accelerator, len(prepared.plan.buckets))
        average = config.ema.build(trained_parameters(transformer)) if config.ema else None
        if saved:
            checkpoint.restore(saved, transformer, core.optimizer, config.optimizer, average)
            failpoint("run.restored")
    trainable = sum(parameter.numel() for parameter in core.parameters)
    say(f"model   {total:,} parameters, {trainable:,} of them trained ({100 * trainable / total:.2f}%)")
    attention = settle_attention(here, transformer, prepared.plan.largest(), device)
    feed = Batches(prepared, config.train.seed, device, accelerator.process_index, core.modulation)
    start = saved.step if saved else 0
    trackers = open_trackers(config, folder, start, accelerator.is_main_process)
    return Run(
        config=config,
        folder=folder,
        accelerator=accelerator,
        device=reason,
        stages=stages,
        prepared=prepared,
        transformer=transformer,
        core=core,
        average=average,
        feed=feed,
        previews=Previews(here, prepared.requests, prepared.text, folder / "samples", core.modulation),
        trackers=trackers,
        start=start,
        steps=steps,
        total=total,
        attention=attention,
        started=started,
        watch=NonFiniteGuard(config, folder, core, feed, accelerator, start, trackers.warn),
        predicted=predicted[0] if predicted else None,
    )


def open_folder(config: TrainConfig, prepared: Prepared, saved: checkpoint.SavedState | None, anew: bool) -> None:
    """Make the run's folder, or open it again, and write what the run is made of.

    Args:
        config: as the user gave it.
        prepared: plan and caches.
        saved: the checkpoint that it continues from, if any.
        anew: an unfinished run without a checkpoint makes room.
    """
    if anew and not saved:
        clear_unsaved(config)
    folder = open_again(config, saved.step) if saved else open_fresh(config)
    write_json(folder / CONFIG, config.model_dump(mode="json", by_alias=True))
    write_json(folder / ENVIRONMENT, describe_machine())
    write_json(folder / DATA, prepared.data())


def make_accelerator(config: TrainConfig) -> tuple[Accelerator, str]:
    """Accelerate's view of the processes and the device, and which device and why."""
    device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # the last block's add_q_proj gets no gradient
    patient = InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[unused, patient])
    if config.memory.optimizer_in_backward and accelerator.num_processes > 1:
        raise UserError(
            f"memory.optimizer_in_backward: {accelerator.num_processes} processes would each update with their own "
            "gradients, before these are averaged. Set it to false, or use one process"
        )
    return accelerator, reason


def announce_resume(
    saved: checkpoint.SavedState, config: TrainConfig, prepared: Prepared, steps: int, processes: int
) -> None:
    """Say what a resumed run continues from and what has changed.

    Raises:
        UserError: it cannot be continued.
    """
    for change in check_resumable(saved, config, prepared.plan.manifest(), processes):
        say(f"resume  changed {change}")
    if saved.step > steps or saved.step == steps == finished_steps(run_folder(config)):
        raise UserError(f"--resume: {saved.step} steps are done and {steps} are asked for. Ask for more: train.steps=N")
    say(f"resume  from {saved.folder}: step {saved.step} of {steps}")
