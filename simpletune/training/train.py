"""Train: set up a run, train it and finish it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

from simpletune.config.batches import with_saved_batch
from simpletune.config.compute import with_saved_compute
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig, run_folder
from simpletune.estimate.simulate.processes import simulate_one_of
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.figure_sums import FIGURES, require_figures
from simpletune.runs.folder import finished_steps, read_summary
from simpletune.runs.remote.checkpoint_store import open_checkpoint_store
from simpletune.runs.repair import require_place
from simpletune.runs.result import result_files
from simpletune.runs.resume import base_of, changed_places, check_resumable, require_same_base
from simpletune.system.console import say, watch_work
from simpletune.system.disk import room_for
from simpletune.system.locks import exclusive
from simpletune.system.options import plural
from simpletune.system.processes import is_first_process, process_count
from simpletune.training.explain_errors import explain_errors
from simpletune.training.finish import finish
from simpletune.training.heartbeats import leave, watch_processes
from simpletune.training.set_up import require_loras, set_up
from simpletune.training.trackers.notifications import notify_end
from simpletune.training.trainer import Trainer


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
        Stopped: SIGTERM or Ctrl-C arrived within ``system.signals.handle_signals``.
    """
    folder = run_folder(config)
    attempt = AttemptRecorder(folder, time.perf_counter() if started is None else started)
    lock = exclusive(folder) if is_first_process() else nullcontext()
    writing = room_for("writing the run's files", folder)
    with (
        lock,
        notify_end(config) as end,
        open_checkpoint_store(config, resume) as store,
        attempt,
        watch_processes(),
        writing,
        simulate_one_of(process_count()),
        watch_work(attempt.note_work),
    ):
        if resume == "auto" and is_finished(config):
            end.silent = True
            return folder
        require_place(folder)
        trainer = Trainer(set_up(config, attempt, store, resume=resume, force=force, estimate_first=estimate_first))
        with trainer.trackers, explain_errors(trainer), trainer.interrupts:
            traces = trainer.train()
            trainer.run_alone(finish, trainer, traces)
        leave(trainer.accelerator)
        return folder


def is_finished(config: TrainConfig) -> bool:
    """Return whether a run with this configuration and length is finished; if so, print it. The first process exports a
    lost result again. Raises UserError if the finished run has other settings that may not change."""
    folder = run_folder(config)
    if finished_steps(folder) is None:
        return False
    summary, saved = read_summary(folder), checkpoint.find_checkpoint("auto", folder)
    if not saved or not summary or summary["steps"] != saved.step:
        return False
    if saved.step != config.steps(summary["steps_per_epoch"]) and not summary.get("stopped_early"):
        return False
    chosen_then = with_saved_batch(with_saved_compute(config, saved.config), saved.config)
    if changed_places(saved, config):
        resolved = resolve_folders(config)
        require_same_base(saved, resolved, base_of(resolved, require_loras(resolved, saved)))
    check_resumable(saved, chosen_then, saved.manifest)
    if is_first_process():
        from simpletune.training.finish_early import restore_result

        restore_result(folder, saved, summary)
        figures = summary.get(FIGURES)
        require_figures(folder, figures if isinstance(figures, dict) else {})
    result = result_files(config, folder)[0]
    say(f"{folder} is already finished ({plural(saved.step, 'step')}). Its result is {result}")
    return True
