"""Train: run the steps of a job, and save, evaluate, generate and answer between them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from simpletune.config.schema import TrainConfig, profile_folder, run_folder
from simpletune.config.validation_schedule import choose_validation_samples, is_due, is_validation_due
from simpletune.engine.denoiser import model_units
from simpletune.engine.fsdp.rank_zero import rank_zero_driver
from simpletune.engine.profiling.profile_option import Profile
from simpletune.engine.profiling.traces import EpochTraces, Facts
from simpletune.models.shared.flops import trained_of
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.best_checkpoint import evaluations_since_best
from simpletune.runs.folder import earlier_validation_samples, put_predicted
from simpletune.runs.remote.checkpoint_store import CheckpointStore
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.batch_loader import BatchLoader, Prefetcher
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.console import TrainingProgress, detail, say
from simpletune.system.options import Json, plural
from simpletune.system.phases import phase
from simpletune.system.signals import SIGNALS, Signals, Stopped, defer_signals, stop_if_requested
from simpletune.system.stage_timer import StageTimer
from simpletune.system.startup import freeze
from simpletune.training.checkpointer import Checkpointer
from simpletune.training.interrupts import Interrupts
from simpletune.training.metrics import Metrics
from simpletune.training.nonfinite import NonFiniteGuard
from simpletune.training.pending_steps import DeviceEvent
from simpletune.training.requested_images import answer_generate
from simpletune.training.trackers import open_trackers
from simpletune.training.validator import OptionalTasks, Validator

if TYPE_CHECKING:
    from simpletune.estimate.job_estimate import Estimate


@dataclass(frozen=True)
class Job:
    """What is settled and loaded before training."""

    config: TrainConfig
    """As the user gave it, except that its batch size is settled; the model's own, with folders and memory settled,
    too, is ``core.config``."""
    accelerator: Accelerator
    stages: StageTimer  # time and memory so far
    prepared: PreparedData
    core: TrainStep  # restored from a checkpoint if the run continues
    batches: BatchLoader  # this process's
    start: int  # first step of this process
    attention: str  # its kernel
    attempt: AttemptRecorder  # of this process
    store: CheckpointStore
    base: Json  # what it trains on (resume.base_of)
    predicted: Estimate | None = None  # the memory
    timed: Json | None = None  # the time and price; None if the run continues, which keeps those of its first start


class Trainer:
    """Trains a job. Its ``trackers`` and ``interrupts`` are contexts, to be held open until the run is finished."""

    def __init__(self, job: Job):
        config, core, plan = job.config, job.core, job.prepared.plan
        # the run
        self.job = job
        self.config: TrainConfig = config
        self.folder = folder = run_folder(config)
        self.stages: StageTimer = job.stages
        self.attempt: AttemptRecorder = job.attempt

        # what a step needs
        self.core: TrainStep = core
        self.plan = plan
        self.batches: BatchLoader = job.batches
        self.accelerator: Accelerator = job.accelerator
        self.main: bool = job.accelerator.is_main_process

        # progress
        self.start: int = job.start
        self.steps: int = config.steps(plan.steps_per_epoch)
        self.early: str | None = None
        """Why the run ended before its planned length, if it did."""

        # what stands beside the steps
        self.trackers = open_trackers(config, folder, job.start, self.main)
        self.guard = NonFiniteGuard(config, folder, core, job.batches, job.start, self.trackers.warn)
        self.metrics = Metrics(folder, core, self.guard, job.attempt, self.trackers, plan.steps_per_epoch)
        self.checkpointer = Checkpointer(config, folder, core, plan, job.stages, job.attempt, job.store, job.base)
        if self.main:
            memory = None if job.predicted is None else job.predicted.as_json()["stages"]
            put_predicted(folder, self.steps, plan.steps_per_epoch, memory, job.timed)
        job.store.note_start(job.start)
        alone = self.accelerator.num_processes == 1
        self.interrupts = Interrupts(folder, job.attempt, self.trackers.warn, alone) if self.main else Interrupts()
        before = earlier_validation_samples(folder) if job.start else None  # which a resumed run keeps
        chosen = choose_validation_samples(config, plan.samples_per_step, self.steps, before)
        if chosen.samples:
            (say if chosen.is_costly else detail)(f"evaluate {chosen.describe()}")
        self.tasks = OptionalTasks(self.accelerator.device, self.trackers.warn)
        self.validator = Validator(
            config,
            folder,
            core,
            job.batches,
            job.prepared,
            chosen.samples,
            job.stages,
            job.attempt,
            self.trackers,
            self.tasks,
        )

    def train(self) -> EpochTraces:
        """Validate the base, run the steps, and save the last one.

        Raises:
            Stopped: a signal or a request ended the run; it is saved.
            UserError: a step was non-finite, or the disk is full.
        """
        self.run_alone(self.validator.before_training, self.start, self.steps)
        self.attempt.set_up()
        processes = self.accelerator.num_processes
        if self.main and self.start < self.steps and Signals.listening:
            most = "one step" if processes == 1 else "two steps"  # the others learn of it a step later
            say(f"stop    Ctrl-C or SIGTERM saves after at most {most}; a second one stops at once")
        stop_if_requested()
        with defer_signals(processes):
            traces = self._steps()
            self.metrics.warn_if_idle()
            if self.start < self.steps:
                self.run_alone(self.checkpointer.save, self.steps)
            # After the save: a launcher ends all processes when one ends.
            if processes > 1 and self._any_process(Signals.received is not None):
                raise Stopped(Signals.received or SIGNALS[0])
        stop_if_requested()
        return traces

    def _steps(self) -> EpochTraces:
        """Run the training loop: plan, noise, predict, loss, backward, update, log."""
        config, core, progress = self.config, self.core, self._progress()
        prefetcher = Prefetcher(self.batches, self.steps, on=config.speed.prefetch and self.stages.cuda)
        core.denoiser.train()
        traces = self._traces()
        traces.announce(self.start)
        if Signals.listening:  # a command's process, which trains once: what is frozen is never collected
            # Otherwise the collector reads model and libraries again and again: 7 of its 10.5 ms a step of SD3 in bf16.
            gc.collect()
            freeze()
        with traces, progress, prefetcher, self.stages.stage("train"):
            for step in range(self.start, self.steps):
                began = DeviceEvent(core.device)
                traces.before_step(step)
                if core.graphs is not None:
                    core.graphs.paused = traces.records  # a replay would hide the operations
                with phase("data"):
                    batches = prefetcher.step(step)
                fetched = time.perf_counter() - began.clock
                loss, norm = core.run(step, self.steps, batches, self.guard.allows_update)
                asked, waited = self.interrupts.poll(), prefetcher.waited
                self.metrics.record_launch(step, began, loss, norm, asked, waited, batches, fetched)
                traces.after_step()  # may write a trace, which does not count as the step's time

                done, last = step + 1, step + 1 == self.steps
                pauses = is_due(config.checkpoint.every, done) or is_due(config.validation.every, done)
                ends = self._log(progress, everything=last or pauses or self.interrupts.ready)
                if last:
                    break  # finish() validates and generates
                if pauses or ends is not None or self.interrupts.ready or self.interrupts.agreed:
                    self.run_alone(self._between_steps, done, progress, ends is not None)
                    self.interrupts.agreed = False
                if ends is not None:
                    self.accelerator.wait_for_everyone()  # a launcher ends all when one ends, even one that is saving
                    raise Stopped(ends, by=None if Signals.received else self.interrupts.stopped_by)
                if self._stops_early(done):
                    break
            self._free_graphs()
        return traces

    def _log(self, progress: TrainingProgress, everything: bool) -> int | None:
        """Log the steps that the device has finished; return the signal that ends the run after the last launched step,
        the same in all processes. If there is one, every step has been logged."""
        stop, answer = self.metrics.log(progress, everything)
        if answer:
            stop |= self.metrics.log(progress, everything=True).stop
            self.interrupts.agreed = True
        ends = self.interrupts.ending_signal(stop)
        if ends is not None:
            self.metrics.log(progress, everything=True)
        return ends

    def _between_steps(self, done: int, progress: TrainingProgress, stops: bool) -> None:
        """Save, evaluate and generate after ``done`` steps if due, and do what the control file asks. A run that stops
        here saves but generates nothing.

        Raises:
            Stopped: a signal arrived while evaluating or generating; this step is saved too.
        """
        config, save = self.config, self.checkpointer.save
        saves = stops or is_due(config.checkpoint.every, done)
        if saves:
            with progress.interruption("save"):
                save(done)
        if stops:
            self.interrupts.stop(self.folder, done)
            return
        validates = is_validation_due(config, done) or is_due(config.validation.every, done)
        if validates or self.interrupts.ready:
            self._free_graphs()
        try:
            if validates:
                with progress.interruption("validate"):
                    self.validator.after_step(done)
            if self.interrupts.ready:
                with progress.interruption("request"):
                    generate = partial(answer_generate, self.validator, self.job.predicted)
                    self.interrupts.answer(done, saves, save, generate)
        except Stopped:
            if not saves:
                save(done)
            raise

    def _free_graphs(self) -> None:
        """Free the memory that the graphs of passes keep, for what comes between two steps or after the last."""
        if self.core.graphs is not None:
            self.core.graphs.drop()

    def _stops_early(self, done: int) -> bool:
        """Return whether training ends after ``done`` steps because the validation loss no longer falls; the same in
        all processes. If so, the run's length becomes ``done``."""
        option = self.config.validation.early_stop
        if option is None or done < option.min_steps or not is_validation_due(self.config, done):
            return False
        if not self._any_process(self.main and evaluations_since_best(self.folder) >= option.patience):
            return False
        without = plural(option.patience, "evaluation")
        self.early = f"stopped early at step {done} of {self.steps}: no lower validation loss in {without}"
        if self.main:
            say(self.early)
        self.steps = done
        return True

    def _any_process(self, asked: bool) -> bool:
        """Return whether something holds in any process."""
        if self.accelerator.num_processes == 1:
            return asked
        flag = torch.tensor(float(asked), device=self.accelerator.device)
        return self.accelerator.reduce(flag, "sum").item() > 0

    def _progress(self) -> TrainingProgress:
        """Return the progress display of the steps."""
        first = self.stages.by_name.get("validate")
        every = {"save": self.config.checkpoint.every, "validate": self.config.validation.every}
        took = {"validate": first.seconds} if first else {}
        samples = self.plan.samples_per_step
        progress = TrainingProgress(self.steps, self.start, samples, self.stages.memory_now, every, took)
        if not self.validator.previews.requests:
            progress.look = "evaluation" if self.validator.evaluator.samples else ""
        return progress

    def _traces(self) -> EpochTraces:
        """Return the profiler traces of the run; only the first process records any."""
        config, core, cuda = self.config, self.core, self.stages.cuda
        trained = trained_of({name: tuple(value.shape) for name, value in core.named.items()})

        def flops(step: int) -> float:  # of a step, which depend on its pictures' shapes
            return float(sum(self.batches.flops(each, trained) for each in self.batches.passes.micro_batches(step)))

        def interrupted(step: int) -> bool:  # validation or saving follows the step
            return is_due(config.checkpoint.every, step + 1) or is_due(config.validation.every, step + 1)

        option = config.profile if self.main else Profile(max_traces=0)
        name, units = torch.cuda.get_device_name() if cuda else "", model_units(core.denoiser)
        facts, folder = Facts(cuda, name, flops, units, interrupted), profile_folder(config)
        return EpochTraces(option, folder, self.steps, self.plan.steps_per_epoch, facts, self.trackers.warn)

    def run_alone(self, work: Callable[..., object], *arguments: object) -> None:
        """Let the first process work alone between two steps. If the weights are sharded, the others help it."""
        driver = rank_zero_driver(self.core.denoiser)
        if self.main:
            with nullcontext() if driver is None else driver.lead():
                work(*arguments)
        elif driver is not None:
            driver.follow(self.core.average, self.checkpointer.save_own_part)
