"""A training run: the loop, and what comes before and after it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import torch

from simpletune.config.resolve import resolved
from simpletune.config.schema import TrainConfig, profile_folder, run_folder
from simpletune.ema import averaged
from simpletune.models.compile import failure as compiling_failed
from simpletune.optim.rounding import key_draws
from simpletune.pipeline.encode import prepare
from simpletune.profiling import EpochTraces, phase
from simpletune.runs import checkpoint
from simpletune.runs.folder import EVALUATION, SKIPPED, SUMMARY, finished_steps, read_json_or_none, read_rows
from simpletune.runs.model_card import shareable, write_card
from simpletune.runs.resume import check_resumable
from simpletune.runs.summary import print_data, print_results, summarise
from simpletune.step.attention import attention_by
from simpletune.step.batches import Prefetcher
from simpletune.step.core import set_learning_rate
from simpletune.system.atomic import write_json
from simpletune.system.console import TrainingProgress, say
from simpletune.system.disk import room_for
from simpletune.system.failpoints import failpoint
from simpletune.system.locks import exclusive
from simpletune.system.processes import is_first_process
from simpletune.system.rng import reseed_global
from simpletune.system.signals import SIGNALS, Stopped, deferred_signals, is_listening, received_signal, stop_if_asked
from simpletune.system.stage_timer import StageTimer
from simpletune.training.metrics_queue import MetricsQueue
from simpletune.training.out_of_memory import out_of_memory, resident
from simpletune.training.pending_steps import DeviceEvent
from simpletune.training.run_profiler import add_memory, traces_of
from simpletune.training.setup import DRAWING, EVALUATING, Run, make_accelerator, set_up


def train(
    config: TrainConfig,
    resume: str | None = None,
    started: float | None = None,
    force: bool = False,
    estimate_first: bool = False,
) -> Path:
    """Run the whole job: prepare, train, validate, export.

    Args:
        config: as the user gave it.
        resume: ``latest``, a checkpoint's folder, or ``auto``: the last checkpoint if there is one, and nothing to do
            if the run is finished.
        started: when the process started, by ``time.perf_counter``.
        force: begin even what does not fit on the device, by prediction.
        foresee: predict the memory on the CPU too.

    Returns:
        The run's folder.

    Raises:
        UserError: for anything that the user can mend.
        Stopped: SIGTERM or Ctrl-C came, where ``stopping.listening`` is on.
    """
    folder = run_folder(config)
    with exclusive(folder) if is_first_process() else nullcontext(), room_for("writing what this run leaves", folder):
        if resume == "auto" and is_finished(config):
            return folder
        run = set_up(config, resume, time.perf_counter() if started is None else started, force, estimate_first)
        with run.trackers, attention_by(config.speed.attention):
            try:
                validate_train_finish(run)
            except torch.OutOfMemoryError as error:
                kinds = resident(run.transformer, run.core.optimizer, run.accelerator.device)
                raise out_of_memory(run.core.config, kinds, error) from None
            except RuntimeError as error:
                failed = compiling_failed(error)
                if failed is None:
                    raise
                raise failed from error
            except Stopped:
                announce_stopped(run)
                raise
        run.accelerator.wait_for_everyone()
        run.accelerator.end_training()  # takes leave of the other processes
        return run.folder


def validate_train_finish(run: Run) -> None:
    """The first pictures, the loop, and what comes after it."""
    if run.main and run.start == 0:
        write_json(run.folder / EVALUATION, {"eval_loss": run.optional(EVALUATING, run.evaluate, 0)})
        run.optional(DRAWING, run.validate, 0)
    elif run.main and run.start < run.steps and due(run.config.validation.every, run.start):
        if not run.has_looked(run.start):  # the run was stopped while it did
            run.look(run.start)
    seconds_setup = time.perf_counter() - run.started
    announce_stops(run)
    stop_if_asked()
    with deferred_signals(run.accelerator.num_processes):
        traces = loop(run)
        if run.main and run.start < run.steps:
            run.save(run.steps)
        stop_together(run)
    stop_if_asked()
    if run.main:
        finish(run, seconds_setup, traces)


def is_finished(config: TrainConfig) -> bool:
    """Whether a run of this configuration and length is finished; then it is said.

    Raises:
        UserError: the finished run was made with settings that may not change.
    """
    folder = run_folder(config)
    if finished_steps(folder) is None:
        return False
    summary, saved = read_json_or_none(folder / SUMMARY), checkpoint.find("auto", folder)
    if not saved or not summary["steps"] == saved.step == config.steps(summary["steps_per_epoch"]):
        return False
    check_resumable(saved, config, saved.manifest)
    say(f"{folder}: already done, {saved.step} steps. Its result: {summary['output']}")
    return True


def announce_stops(run: Run) -> None:
    """Say what a signal will do."""
    if run.main and run.start < run.steps and is_listening():
        steps = "one step" if run.accelerator.num_processes == 1 else "two steps"  # the others learn it a step later
        say(f"stops   SIGTERM and Ctrl-C finish at most {steps} and save once; a second one stops at once")


def stop_together(run: Run) -> None:
    """After the last step: stop in all processes if one was asked. A launcher ends them all when one has ended.

    Raises:
        Stopped: one was.
    """
    if run.accelerator.num_processes == 1:
        return
    asked = torch.tensor(received_signal() is not None, dtype=torch.float32, device=run.accelerator.device)
    if run.accelerator.reduce(asked, "sum").item() > 0:  # after the save
        raise Stopped(received_signal() or SIGNALS[0])


def announce_stopped(run: Run) -> None:
    """Say what a run that was asked to stop has kept."""
    if not run.main:
        return
    found = checkpoint.list_checkpoints(run.folder)
    kept = f"step {found[-1][0]} of {run.steps} is saved: {found[-1][1]}" if found else "before the first step"
    say(f"stopped: {kept}")


def loop(run: Run) -> EpochTraces:
    """The training loop: plan, noise, predict, loss, backward, step, log.

    Returns:
        The profiler's windows.
    """
    config, process, device = run.config, run.accelerator.process_index, run.accelerator.device
    line = progress_of(run)
    ledger = MetricsQueue(run, line)
    feed = Prefetcher(run.feed, run.steps, on=config.speed.prefetch and run.stages.cuda)
    run.transformer.train()
    with traces_of(run, lambda step: is_interrupted(config, step)) as traces, line, feed, run.stages.stage("train"):
        for step in range(run.start, run.steps):
            began = DeviceEvent(device)
            failpoint("step.begun")
            traces.before_step(step)
            with phase("data"):
                batches = feed.step(step)
            reseed_global(config.train.seed, "step", step, process)
            lr = config.optimizer.lr * config.schedule.factor(step, run.steps)
            set_learning_rate(run.core.optimizer, lr)
            key_draws(run.core.optimizer, config.train.seed, step)
            loss, norm = run.core.step(batches, run.watch.gate)
            if run.average is not None and not run.watch.skipping:
                run.average.update()
            launched = run.watch.launched(step, lr, began, loss, norm)
            failpoint("step.updated")
            traces.after_step()  # writes a trace now and then: not part of the step's time

            last = step + 1 == run.steps
            signal = ledger.add(launched, whole=last or is_interrupted(config, step))  # reads the step before
            if last:
                break  # what follows the last step is not the loop's
            if run.main:
                save_and_validate(run, step + 1, line, stops=signal is not None)
            if signal is not None:
                run.accelerator.wait_for_everyone()  # a launcher ends all when one has ended: not while one saves
                raise Stopped(signal)
    return traces


def save_and_validate(run: Run, done: int, line: TrainingProgress, stops: bool) -> None:
    """What comes between two steps, where it is due: save, evaluate, draw.

    Args:
        run: of the loop.
        done: how many steps are done.
        line: the progress.
        stops: whether the run stops here: then it saves, and does not draw.

    Raises:
        Stopped: a signal came while evaluating or drawing; this step is saved too.
    """
    config = run.config
    saves = stops or due(config.checkpoint.every, done)
    if saves:
        with line.interrupted("save"):
            run.save(done)
    if stops or not due(config.validation.every, done):
        return
    try:
        with line.interrupted("validate"):
            run.look(done)
    except Stopped:
        if not saves:
            run.save(done)
        raise


def is_interrupted(config: TrainConfig, step: int) -> bool:
    """Whether validation or saving stands between a step and the next."""
    return due(config.checkpoint.every, step + 1) or due(config.validation.every, step + 1)


def progress_of(run: Run) -> TrainingProgress:
    """What a person sees of the loop."""
    train, first = run.config.train, run.stages.by_name.get("validate")
    samples = train.batch_size * train.gradient_accumulation * run.accelerator.num_processes
    every = {"save": run.config.checkpoint.every, "validate": run.config.validation.every}
    took = {"validate": first.seconds} if first else {}
    return TrainingProgress(run.steps, run.start, samples, run.stages.memory_now, every, took)


def due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def finish(run: Run, seconds_setup: float, traces: EpochTraces) -> None:
    """Export, then look: what is trained is saved, and safe, before the last pictures are drawn."""
    failpoint("finish.saved")
    with run.stages.stage("save"), averaged(run.average):
        metadata = checkpoint.metadata_of(shareable(run.config), run.steps)
        output = run.config.adapter.export(run.transformer, run.folder, metadata)
    failpoint("finish.exported")
    eval_after = run.optional(EVALUATING, run.evaluate, run.steps)
    run.optional(DRAWING, run.validate, run.steps)
    processes = run.accelerator.num_processes
    summary = summarise(run.config, run.folder, run.device, run.stages, run.seconds, run.steps, processes)
    summary |= {
        "seconds_total": round(time.perf_counter() - run.started, 2),
        "seconds_setup": round(seconds_setup, 2),
        "seconds_to_first_step": None if run.to_first_step is None else round(run.to_first_step, 2),
        "attention": run.attention,
        "trainable_parameters": sum(parameter.numel() for parameter in run.core.parameters),
        "total_parameters": run.total,
        "steps_per_epoch": run.prepared.plan.steps_per_epoch,
        "eval_loss_before": (read_json_or_none(run.folder / EVALUATION) or {}).get("eval_loss"),
        "eval_loss_after": eval_after,
        "output": str(output),
    }
    if skipped := len(list(read_rows(run.folder / SKIPPED))):
        summary["skipped_steps"] = skipped
    if run.predicted is not None:
        from simpletune.estimate.forecast import compare_with_measured

        summary["predicted"] = compare_with_measured(run.predicted, summary["stages"])
    warnings = run.trackers.warnings
    # Written again below: a tracker may take minutes to close.
    write_json(run.folder / SUMMARY, summary | {"warnings": warnings, "complete": False})
    failpoint("finish.summary")
    run.optional("the model card", write_card, run.folder, run.config, summary, run.prepared)
    add_memory(run, traces)
    page, said = write_page(run), len(warnings)
    failpoint("finish.reported")
    places = {**page, **run.trackers.finish(summary)}
    write_json(run.folder / SUMMARY, summary | {"warnings": warnings, "complete": True})
    if page and len(warnings) > said:
        write_page(run)
    print_results(summary, run.folder, profile_folder(run.config), traces.written, places)
    if run.predicted is not None:
        from simpletune.estimate.forecast import print_comparison

        print_comparison(summary["predicted"])


def write_page(run: Run) -> dict[str, str]:
    """The report of the run, into its folder: a failure is a warning and never the run's."""
    if not run.config.output.report:
        return {}
    try:
        from simpletune.report import report_at_end

        page = report_at_end(run.folder)
    except Exception as error:  # whatever it is: a page is not worth a run
        run.trackers.warn(f"the report failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})")
        return {}
    run.trackers.report(page)
    return {"report": str(page)}


def prepare_only(config: TrainConfig) -> None:
    """Fill the cache and stop: the later run starts at its first step, on a smaller machine perhaps."""
    accelerator, reason = make_accelerator(config)
    say(f"simpletune {config.name}: prepare on {reason}")
    stages = StageTimer(cuda=accelerator.device.type == "cuda")
    prepared = prepare(resolved(config), accelerator, stages)
    print_data(prepared)
    for name, figures in stages.as_json().items():
        say(f"{name:<8}{figures['seconds']:.1f} s")
