"""Work between two steps: saving, evaluating, drawing, answering requests, ending early."""

from __future__ import annotations

from functools import partial

import torch

from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import is_validation_due
from simpletune.runs.best_checkpoint import since_best
from simpletune.system.console import TrainingProgress
from simpletune.system.signals import Stopped
from simpletune.training.requested_pictures import try_to_draw
from simpletune.training.run import Run, due


def save_and_validate(run: Run, done: int, progress: TrainingProgress, stops: bool) -> None:
    """Save, evaluate and draw between two steps if due, and do what the control file asks.

    Args:
        run: current run.
        done: number of finished steps.
        progress: progress display.
        stops: whether the run stops here; then it saves but does not draw.

    Raises:
        Stopped: a signal arrived while evaluating or drawing; this step is saved too.
    """
    config = run.config
    saves = stops or due(config.checkpoint.every, done)
    if saves:
        with progress.interrupted("save"):
            run.save(done)
    if stops:
        run.control.stop(run.folder, done)
        return
    try:
        if is_validation_due(config, done) or due(config.validation.every, done):
            with progress.interrupted("validate"):
                run.look(done)
        if run.control.ready:
            with progress.interrupted("request"):
                run.control.answer(done, saves, run.save, partial(try_to_draw, run))
    except Stopped:
        if not saves:
            run.save(done)
        raise


def is_due(run: Run, done: int, stops: bool) -> bool:
    """Return whether ``save_and_validate`` may have something to do; the same in all processes.

    Args:
        run: current run.
        done: number of finished steps.
        stops: whether the run stops here.
    """
    config, asked = run.config, run.control.may_answer
    regular = due(config.checkpoint.every, done) or due(config.validation.every, done)
    return stops or asked or regular or is_validation_due(config, done)


def stops_early(run: Run, done: int) -> bool:
    """Return whether training ends after ``done`` steps because the validation loss no longer falls; the same in all
    processes. If so, the run's length becomes ``done``."""
    option = run.config.validation.early_stop
    if option is None or done < option.min_steps or not is_validation_due(run.config, done):
        return False
    asked = run.main and since_best(run.folder) >= option.patience
    if run.accelerator.num_processes > 1:
        asked = run.accelerator.reduce(torch.tensor(float(asked), device=run.accelerator.device), "sum").item() > 0
    if asked:
        run.stop_at(done)
    return asked


def is_interrupted(config: TrainConfig, step: int) -> bool:
    """Return whether validation or saving follows a step."""
    return due(config.checkpoint.every, step + 1) or due(config.validation.every, step + 1)
