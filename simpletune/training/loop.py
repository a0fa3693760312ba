"""Run the training loop, with set-up before and export after it."""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator

from simpletune.config.batches import kept_batch
from simpletune.config.compute import compute_of, kept_compute, settle_compute
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig, run_folder
from simpletune.data.storage.claims import KeyRange
from simpletune.engine.optim.rounding import key_draws
from simpletune.engine.profiling.traces import EpochTraces
from simpletune.estimate.simulate.processes import one_of
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import EVALUATION, append_metrics, finished_steps, read_summary
from simpletune.runs.remote.checkpoint_store import open_checkpoint_store
from simpletune.runs.repair import require_place
from simpletune.runs.result import result_files
from simpletune.runs.resume import check_resumable
from simpletune.runs.summary import print_data
from simpletune.stages.copy_cache import copy_cache
from simpletune.stages.encode import encode
from simpletune.stages.plan_data import plan_data
from simpletune.stages.step.batch_loader import Prefetcher
from simpletune.stages.step.train_step import set_learning_rate
from simpletune.system.atomic import write_json
from simpletune.system.console import TrainingProgress, say
from simpletune.system.devices import capability_of
from simpletune.system.disk import room_for
from simpletune.system.locks import exclusive
from simpletune.system.options import plural
from simpletune.system.phases import phase
from simpletune.system.processes import is_first_process, processes
from simpletune.system.signals import (
    SIGNALS,
    Stopped,
    deferred_signals,
    is_listening,
    received_signal,
    stop_if_requested,
)
from simpletune.system.stage_timer import StageTimer
from simpletune.training.accelerator import make_accelerator
from simpletune.training.between_steps import is_due, is_interrupted, save_and_validate, stops_early
from simpletune.training.class_pictures import with_class_pictures
from simpletune.training.ending import explained
from simpletune.training.finish import finish
from simpletune.training.finish_early import restore_result
from simpletune.training.heartbeats import part_company, watched
from simpletune.training.pending_steps import DeviceEvent, InterruptFlags, MetricsQueue, PendingStep, global_figures
from simpletune.training.run import DRAWING, EVALUATING, Run
from simpletune.training.run_profiler import traces_of
from simpletune.training.setup import StartOptions, set_up


def train(
    config: TrainConfig,
    resume: str | None = None,
    started: float | None = None,
    force: bool = False,
    estimate_first: bool = False,
) -> Path:
    """Run the whole job: prepare, train, validate and export.

    Args:
        config: configuration as the user gave it.
        resume: ``latest``, a checkpoint's folder, or ``auto``: continue from the last checkpoint if one exists, and do
            nothing if the run is finished.
        started: start time of the process by ``time.perf_counter``.
        force: start even if the run is predicted not to fit.
        estimate_first: predict the memory on the CPU too.

    Returns:
        The run's folder.

    Raises:
        UserError: anything that the user can fix.
        Stopped: SIGTERM or Ctrl-C arrived within ``system.signals.listening``.
    """
    folder = run_folder(config)
    attempt = AttemptRecorder(folder, time.perf_counter() if started is None else started)
    lock = exclusive(folder) if is_first_process() else nullcontext()
    writing = room_for("writing the run's files", folder)
    with lock, open_checkpoint_store(config, resume) as store, attempt, watched(), writing, one_of(processes()):
        if resume == "auto" and is_finished(config):
            return folder
        require_place(folder)
        run = set_up(config, StartOptions(attempt, resume, force, estimate_first, store))
        with run.trackers, explained(run), run.control:
            validate_train_finish(run)
        leave(run.accelerator)
        return run.folder


def validate_train_finish(run: Run) -> None:
    """Validate the base, train, and finish the run."""
    run.first_alone(validate_first, run)
    run.attempt.set_up()
    announce_stops(run)
    stop_if_requested()
    with deferred_signals(run.accelerator.num_processes):
        traces = loop(run)
        if run.start < run.steps:
            run.first_alone(run.save, run.steps)
        stop_together(run)
    stop_if_requested()
    run.first_alone(finish, run, traces)


def validate_first(run: Run) -> None:
    """Evaluate and draw before the first step of this process, if that is still to be done."""
    if run.start == 0:
        before = run.optional(EVALUATING, run.evaluate, 0)
        write_json(run.folder / EVALUATION, {"eval_loss": before, **run.evaluated_on})
        run.optional(DRAWING, run.validate, 0)
    elif run.start < run.steps:
        run.look(run.start)  # if the run was stopped while evaluating or drawing


def is_finished(config: TrainConfig) -> bool:
    """Return whether a run with this configuration and length is finished; if so, print it. The first process exports a
    lost result again.

    Raises:
        UserError: the finished run has other settings that may not change.
    """
    folder = run_folder(config)
    if finished_steps(folder) is None:
        return False
    summary, saved = read_summary(folder), checkpoint.find_checkpoint("auto", folder)
    if not saved or not summary or summary["steps"] != saved.step:
        return False
    if saved.step != config.steps(summary["steps_per_epoch"]) and not summary.get("stopped_early"):
        return False
    check_resumable(saved, kept_batch(kept_compute(config, compute_of(saved.config)), saved.config), saved.manifest)
    if is_first_process():
        restore_result(folder, saved, summary)
    result = result_files(config, folder)[0]
    say(f"{folder} is already finished ({plural(saved.step, 'step')}). Its result is {result}")
    return True


def announce_stops(run: Run) -> None:
    """Print what a signal does."""
    if run.main and run.start < run.steps and is_listening():
        steps = "one step" if run.accelerator.num_processes == 1 else "two steps"  # the others learn of it a step later
        say(f"stops   SIGTERM or Ctrl-C finishes at most {steps} and saves; a second one stops at once")


def stop_together(run: Run) -> None:
    """Stop all processes after the last step if any received a signal; a launcher ends all when one ends.

    Raises:
        Stopped: a process received a signal.
    """
    if run.accelerator.num_processes == 1:
        return
    asked = torch.tensor(received_signal() is not None, dtype=torch.float32, device=run.accelerator.device)
    if run.accelerator.reduce(asked, "sum").item() > 0:  # after the save
        raise Stopped(received_signal() or SIGNALS[0])


def leave(accelerator: Accelerator) -> None:
    """Wait for the other processes and close the process group.

    Keeps a reference to the group until the process ends. Otherwise the last reference is dropped with the DDP model,
    in a thread that holds the GIL and joins gloo's thread; that thread may need the GIL to free the barrier's tensors,
    which is a deadlock (seen with torch 2.13.0 on the CPU).
    """
    part_company(accelerator)
    if accelerator.num_processes > 1:
        _closed_groups.append(torch.distributed.group.WORLD)
    accelerator.end_training()


_closed_groups: list[torch.distributed.ProcessGroup | None] = []


def loop(run: Run) -> EpochTraces:
    """Run the training loop: plan, noise, predict, loss, backward, step, log.

    Returns:
        The profiler's traces.
    """
    config, device = run.config, run.accelerator.device
    progress, pending = run.progress(), MetricsQueue(ahead=0 if run.guard.skips else 1)
    prefetcher = Prefetcher(run.batches, run.steps, on=config.speed.prefetch and run.stages.cuda)
    run.denoiser.train()
    traces = traces_of(run, lambda step: is_interrupted(config, step))
    with traces, progress, prefetcher, run.stages.stage("train"):
        for step in range(run.start, run.steps):
            began = DeviceEvent(device)
            traces.before_step(step)
            with phase("data"):
                batches = prefetcher.step(step)
            lr = config.optimizer.lr * config.schedule.factor(step, run.steps)
            set_learning_rate(run.core.optimizer, lr)
            key_draws(run.core.optimizer, config.train.seed, step)
            if run.core.fp16 is not None:
                run.core.fp16.at_step(step)
            if run.core.text is not None:
                run.core.text.at_step(step, run.steps)
            loss, norm = run.core.step(batches, run.guard.allows_update)
            if run.average is not None and not run.guard.skipping:
                run.average.update(None if run.core.fp16 is None else run.core.fp16.scale.overflow)
            run.control.look()
            figures = global_figures(loss, norm, run.core, asked_now(run))
            launched = PendingStep.launched(step, lr, began, run.core, figures)
            pending.push(replace(launched, waited=prefetcher.waited))
            traces.after_step()  # may write a trace, which does not count as the step's time

            last = step + 1 == run.steps
            interrupted = last or is_interrupted(config, step) or run.control.ready
            ends = log_steps(run, pending, progress, everything=interrupted)
            if last:
                break  # finish() handles the last step
            if is_due(run, step + 1, stops=ends is not None):
                run.first_alone(save_and_validate, run, step + 1, progress, ends is not None)
                run.control.settle()
            if ends is not None:
                run.accelerator.wait_for_everyone()  # a launcher ends all when one ends, even one that is saving
                raise Stopped(ends, by=None if received_signal() else run.control.stopped_by)
            if stops_early(run, step + 1):
                break
    return traces


def log_steps(run: Run, pending: MetricsQueue, progress: TrainingProgress, everything: bool) -> int | None:
    """Log the steps that the device has finished.

    Args:
        run: current run.
        pending: launched steps.
        progress: progress display.
        everything: also wait for the last launched step.

    Returns:
        The signal that ends the run after the last launched step, the same in all processes; if there is one, every
        step has been logged.

    Raises:
        UserError: a step was non-finite, or the disk is full.
    """
    asked = [log_step(run, done, progress) for done in pending.pop(everything)]
    if any(each.answer for each in asked):
        asked += [log_step(run, done, progress) for done in pending.pop(everything=True)]
        run.control.agree()
    ends = stop_signal(run, any(each.stop for each in asked))
    if ends is not None:
        for done in pending.pop(everything=True):
            log_step(run, done, progress)
    return ends


def log_step(run: Run, done: PendingStep, progress: TrainingProgress) -> InterruptFlags:
    """Log one step to the metrics, the trackers and the progress line.

    Returns:
        What the processes were asked when the step was launched.
    """
    loss, norm, asked = done.read()
    run.to_first_step = run.to_first_step or done.finished - run.attempt.began
    if run.guard.check(done, loss, norm) and run.main:
        row = {"loss": loss, "lr": done.lr, "seconds": round(done.seconds, 6), "grad_norm": norm}
        row |= {"loss_scale": done.fp16[0]} if run.core.fp16 is not None else {}
        row |= {"waited": round(done.waited, 6)} if done.waited is not None else {}
        epoch = done.step // run.prepared.plan.steps_per_epoch
        append_metrics(run.folder, {"step": done.step + 1, "epoch": epoch, **row})
        run.attempt.last_step = done.step + 1
        run.trackers.scalars(done.step + 1, row)
        progress.update(done.step + 1, loss, done.seconds)
    return asked


def asked_now(run: Run) -> InterruptFlags:
    """Return what is asked of this process."""
    return InterruptFlags(received_signal() is not None or run.control.stops, run.control.waits)


def stop_signal(run: Run, asked: bool) -> int | None:
    """Return the signal that ends the run; SIGINT for a request. Several processes stop together at the first step that
    reports one."""
    if run.accelerator.num_processes == 1:
        asked = asked_now(run).stop
    return (received_signal() or (signal.SIGINT if run.control.stops else SIGNALS[0])) if asked else None


def prepare_only(config: TrainConfig, source: str | None = None) -> None:
    """Fill the cache and stop, so that a later run, perhaps on a smaller machine, can start training at once.

    Several processes can divide the work, started by one launcher or by several on machines that share the cache's
    folder.

    Args:
        config: configuration as the user gave it.
        source: the folder or URL of another cache, whose samples are copied instead of encoded; None: encode all.

    Raises:
        UserError: anything that the user can fix.
    """
    with watched():
        accelerator, reason = make_accelerator(config)
        config = settle_compute(config, capability_of(accelerator.device))
        say(f"simpletune {config.name}: prepare on {reason}")
        stages = StageTimer(cuda=accelerator.device.type == "cuda")
        resolved = with_class_pictures(resolve_folders(config), accelerator, stages)
        data = plan_data(resolved)
        if source is not None:
            with stages.stage("copy"):
                copy_cache(resolved, data.plan, source, KeyRange(accelerator.process_index, accelerator.num_processes))
        prepared = encode(resolved, data, accelerator, stages)
        print_data(prepared)
        for name, figures in stages.as_json().items():
            say(f"{name:<8}{figures['seconds']:.1f} s")
        leave(accelerator)
