"""A training run: set up, loop, finish."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from PIL import Image
from torch import nn

from simpletune import checkpoint
from simpletune.card import shareable, write_card
from simpletune.config import Profile, TrainConfig, cache_of_bases, profile_folder, run_folder
from simpletune.devices import choose_device
from simpletune.ema import Average, averaged
from simpletune.feed import Feed
from simpletune.levers import within_budget
from simpletune.loading import load_base
from simpletune.optim.rounding import key_draws
from simpletune.options import UserError
from simpletune.places import require_fit, resolved
from simpletune.prepare import Prepared, prepare
from simpletune.profiling import EpochTraces, phase
from simpletune.rescue import not_finite, out_of_memory, resident
from simpletune.runs import CONFIG, EVALUATION, SUMMARY, append_metrics, open_again, open_fresh, read_json_or_none
from simpletune.stages import Stages
from simpletune.step import StepCore, assemble, set_learning_rate, trained_parameters
from simpletune.streams import reseed_global
from simpletune.summary import summarise, tell_data, tell_results
from simpletune.terminal import TrainingLine, say
from simpletune.trackers import Trackers, open_trackers
from simpletune.validation import Previews, evaluation_loss


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
        started: when the process started, by ``time.perf_counter``.
        seconds: of each step done by this process.
    """

    config: TrainConfig
    folder: Path
    accelerator: Accelerator
    device: str
    stages: Stages
    prepared: Prepared
    transformer: nn.Module
    core: StepCore
    feed: Feed
    average: Average | None
    previews: Previews
    trackers: Trackers
    start: int
    steps: int
    total: int
    started: float
    seconds: list[float] = field(default_factory=list)

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.accelerator.is_main_process

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        with self.stages.stage("save"):
            manifest = self.prepared.plan.manifest()
            optimizer = self.core.optimizer
            checkpoint.save(self.folder, step, self.config, self.transformer, optimizer, manifest, self.average)

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
            self.trackers.scalars(step, {"eval_loss": loss})
        return loss


def train(config: TrainConfig, resume: str | None = None, started: float | None = None) -> Path:
    """Run the whole job: prepare, train, validate, export.

    Args:
        config: as the user gave it.
        resume: ``latest`` or a checkpoint's folder.
        started: when the process started, by ``time.perf_counter``.

    Returns:
        The run's folder.

    Raises:
        UserError: for anything that the user can mend.
    """
    run = set_up(config, resume, time.perf_counter() if started is None else started)
    with run.trackers:
        try:
            look_train_finish(run)
        except torch.OutOfMemoryError as error:
            kinds = resident(run.transformer, run.core.optimizer, run.accelerator.device)
            raise out_of_memory(resolved(run.config), kinds, error) from None
    run.accelerator.wait_for_everyone()
    return run.folder


def look_train_finish(run: Run) -> None:
    """The first pictures, the loop, and what comes after it."""
    if run.main and run.start == 0:
        checkpoint.write_json(run.folder / EVALUATION, {"eval_loss": run.evaluate(0)})
        run.validate(0)
    seconds_setup = time.perf_counter() - run.started
    traces = loop(run)
    if run.main:
        finish(run, seconds_setup, traces)


def loop(run: Run) -> list[Path]:
    """The training loop: plan, noise, predict, loss, backward, step, log.

    Returns:
        The traces written.
    """
    config, plan, process = run.config, run.prepared.plan, run.accelerator.process_index
    line = TrainingLine(run.steps, run.start)
    option = config.profile if run.main else Profile(max_traces=0)
    traces = EpochTraces(option, profile_folder(config), run.steps, plan.steps_per_epoch, run.stages.cuda)
    run.transformer.train()
    with traces, run.stages.stage("train"):
        for step in range(run.start, run.steps):
            clock = time.perf_counter()
            traces.before_step(step)
            with phase("data"):
                batches = run.feed.step(step)
            reseed_global(config.train.seed, "step", step, process)
            lr = config.optimizer.lr * config.schedule.factor(step, run.steps)
            set_learning_rate(run.core.optimizer, lr)
            key_draws(run.core.optimizer, config.train.seed, step)
            loss, norm = run.core.step(batches)
            if run.average is not None:
                run.average.update()
            value = run.accelerator.reduce(loss, "mean").item()
            run.seconds.append(time.perf_counter() - clock)
            traces.after_step()  # writes a trace now and then: not part of the step's time

            if not math.isfinite(value):
                raise not_finite(run.folder, step, value, batches)
            if not run.main:
                continue
            row = {"loss": value, "lr": lr, "seconds": round(run.seconds[-1], 6)}
            row |= {} if norm is None else {"grad_norm": norm.item()}
            append_metrics(run.folder, {"step": step + 1, "epoch": step // plan.steps_per_epoch, **row})
            run.trackers.scalars(step + 1, row)
            line.update(step + 1, value, run.seconds[-1])
            if step + 1 < run.steps and due(config.checkpoint.every, step + 1):
                run.save(step + 1)
            if step + 1 < run.steps and due(config.validation.every, step + 1):
                run.evaluate(step + 1)
                run.validate(step + 1)
    return traces.written


def due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def finish(run: Run, seconds_setup: float, traces: list[Path]) -> None:
    """Save, export, then look: what is trained is safe before the last pictures are drawn."""
    run.save(run.steps)
    with run.stages.stage("save"), averaged(run.average):
        metadata = checkpoint.metadata_of(shareable(run.config), run.steps)
        output = run.config.adapter.export(run.transformer, run.folder, metadata)
    eval_after = run.evaluate(run.steps)
    run.validate(run.steps)
    processes = run.accelerator.num_processes
    summary = summarise(run.config, run.folder, run.device, run.stages, run.seconds, run.steps, processes)
    summary |= {
        "seconds_total": round(time.perf_counter() - run.started, 2),
        "seconds_setup": round(seconds_setup, 2),
        "trainable_parameters": sum(parameter.numel() for parameter in run.core.parameters),
        "total_parameters": run.total,
        "eval_loss_before": (read_json_or_none(run.folder / EVALUATION) or {}).get("eval_loss"),
        "eval_loss_after": eval_after,
        "output": str(output),
    }
    checkpoint.write_json(run.folder / SUMMARY, summary)  # again below: a tracker may take minutes to close
    write_card(run.folder, run.config, summary, run.prepared)
    places = run.trackers.finish(summary)
    checkpoint.write_json(run.folder / SUMMARY, summary | {"warnings": run.trackers.warnings})
    tell_results(summary, run.folder, profile_folder(run.config), traces, places)


def set_up(config: TrainConfig, resume: str | None, started: float) -> Run:
    """Everything before the first step: device, data, caches, folder, model."""
    accelerator, reason = make_accelerator(config)
    device = accelerator.device
    stages = Stages(cuda=device.type == "cuda")
    saved = checkpoint.find(resume, run_folder(config)) if resume else None
    say(
        f"simpletune {config.name} on {reason}: {config.precision.weights} weights, {config.precision.compute} products"
    )
    here = resolved(config)
    require_fit(here)
    prepared = prepare(here, accelerator, stages)
    tell_data(prepared)
    steps = config.steps(prepared.plan.steps_per_epoch)
    largest = max(prepared.plan.buckets, key=lambda size: size[0] * size[1])
    chosen = within_budget(here, largest)  # for what is assembled; the run's config keeps auto
    if saved:
        tell_resume(saved, config, prepared, steps)
    folder = run_folder(config)
    if accelerator.is_main_process:
        folder = open_again(config, saved.step) if saved else open_fresh(config)
        checkpoint.write_json(folder / CONFIG, config.model_dump(mode="json", by_alias=True))
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
        total = here.model.parameter_count()
        core = assemble(chosen, transformer, accelerator)
        average = config.ema.build(trained_parameters(transformer)) if config.ema else None
        if saved:
            checkpoint.restore(saved, transformer, core.optimizer, config.optimizer, average)
    trainable = sum(parameter.numel() for parameter in core.parameters)
    say(f"model   {total:,} parameters, {trainable:,} of them trained ({100 * trainable / total:.2f}%)")
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
        feed=Feed(prepared, config.train.seed, device, accelerator.process_index, core.modulation),
        previews=Previews(here, prepared.requests, prepared.text, folder / "samples", core.modulation),
        trackers=open_trackers(config, folder, saved.step if saved else 0, accelerator.is_main_process),
        start=saved.step if saved else 0,
        steps=steps,
        total=total,
        started=started,
    )


def make_accelerator(config: TrainConfig) -> tuple[Accelerator, str]:
    """Accelerate's view of the processes and the device, and which device and why."""
    device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # the last block's add_q_proj gets no gradient
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[unused])
    if config.memory.optimizer_in_backward and accelerator.num_processes > 1:
        raise UserError(
            f"memory.optimizer_in_backward: {accelerator.num_processes} processes would each update with their own "
            "gradients, before these are averaged. Set it to false, or use one process"
        )
    return accelerator, reason


def tell_resume(saved: checkpoint.SavedState, config: TrainConfig, prepared: Prepared, steps: int) -> None:
    """Say what a resumed run continues from and what has changed.

    Raises:
        UserError: it cannot be continued.
    """
    for change in checkpoint.check_resumable(saved, config, prepared.plan.manifest()):
        say(f"resume  changed {change}")
    if saved.step >= steps:
        raise UserError(f"--resume: {saved.step} steps are done and {steps} are asked for. Ask for more: train.steps=N")
    say(f"resume  from {saved.folder}: step {saved.step} of {steps}")


def prepare_only(config: TrainConfig) -> None:
    """Fill the cache and stop: the later run starts at its first step, on a smaller machine perhaps."""
    accelerator, reason = make_accelerator(config)
    say(f"simpletune {config.name}: prepare on {reason}")
    stages = Stages(cuda=accelerator.device.type == "cuda")
    prepared = prepare(resolved(config), accelerator, stages)
    tell_data(prepared)
    for name, figures in stages.as_json().items():
        say(f"{name:<8}{figures['seconds']:.1f} s")
