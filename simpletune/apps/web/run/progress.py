"""A run's progress: how far it is, the time left, coming interruptions, and what to do if it ended early."""

from __future__ import annotations

import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.apps.web.run.series import Follower, Followers
from simpletune.config.validation_schedule import standard_error
from simpletune.runs.attempts import Attempt, attempts_of, merged_stages
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import CONFIG, EVALUATION, EVALUATIONS, METRICS, PLANNED, SAMPLES
from simpletune.runs.report.charts import ChartLine, svg_lines
from simpletune.runs.report.run_data import read_object
from simpletune.system.console import TrainingProgress, duration
from simpletune.system.options import Json
from simpletune.system.stage_timer import Stage

if TYPE_CHECKING:
    from simpletune.apps.web.run_state import RunState

FOLLOWED = ("loss", "lr", "grad_norm", "seconds")
METRIC_ROWS, EVALUATION_ROWS = Followers(FOLLOWED), Followers((), keep=1000)
ENDED = {"stopped": "was stopped", "failed": "failed", "killed": "was killed, or its machine went down"}


@dataclass(frozen=True)
class Progress:
    """A run's progress.

    Args:
        state: the state shown on the page of all runs.
        steps: planned steps; None if not known yet.
        pace: median seconds of the last steps.
        left: time left; empty if unknown.
        coming: coming interruptions, in words.
        stages: time and peak memory by stage.
        predicted: predicted memory by stage, as in ``estimate --json``; empty without a prediction.
        trouble: why it ended early, and what to do; empty otherwise.
        command: the command that fixes it; empty if nothing needs fixing.
    """

    state: RunState
    steps: int | None
    pace: float | None
    left: str
    coming: list[str]
    stages: dict[str, Stage]
    predicted: Json
    trouble: str
    command: str

    @property
    def running(self) -> bool:
        """Whether a process is training it now."""
        return self.state.word == "running"

    @property
    def share(self) -> int:
        """Finished steps in percent."""
        return min(100, 100 * self.state.done // self.steps) if self.steps else 0


def read_progress(folder: Path, state: RunState) -> Progress:
    """Read a run's progress; damaged files count as missing.

    Args:
        folder: run folder.
        state: the state shown on the page of all runs.
    """
    planned = read_object(folder / PLANNED, [], expected=False)
    rows = METRIC_ROWS.of(folder / METRICS)
    steps = planned["steps"] if isinstance(planned.get("steps"), int) else state.steps
    pace = pace_of(rows)
    attempts = attempts_of(folder)
    stages = merged_stages(attempts)
    left, coming = "", []
    if state.word == "running" and steps and pace and state.done:
        every = {"save": _every(state.settings, "checkpoint"), "validate": _every(state.settings, "validation")}
        took = {name: _each_took(folder, name, stages) for name in every}
        left = duration(TrainingProgress(steps, 0, every=every, took=took).left(state.done, pace))
        coming = interruptions(state.done, steps, pace, every)
    trouble = trouble_of(state, attempts)
    command = shlex.join(["simpletune", "train", str(folder / CONFIG), "--resume", "auto"]) if trouble else ""
    predicted = planned.get("predicted")
    found = predicted if isinstance(predicted, dict) else {}
    return Progress(state, steps, pace, left, coming, stages, found, trouble, command)


def pace_of(rows: Follower) -> float | None:
    """The median seconds of the last steps."""
    seconds = [row["seconds"] for row in rows.recent if isinstance(row.get("seconds"), int | float)]
    return statistics.median(seconds) if seconds else None


def interruptions(done: int, steps: int, pace: float, every: dict[str, int | None]) -> list[str]:
    """Describe when the run saves and validates next."""
    words = {"save": "saves", "validate": "evaluates and draws"}
    found = []
    for name, period in every.items():
        at = min((done // period + 1) * period, steps) if period else steps
        found.append(f"{words[name]} after step {at:,}, in {duration((at - done) * pace)}")
    return found


def trouble_of(state: RunState, attempts: list[Attempt]) -> str:
    """Explain why a run is not finished; empty if it is running or finished."""
    if state.word not in ENDED:
        return ""
    ending = f"This run {ENDED[state.word]}"
    if state.word == "stopped":
        return f"{ending} by {state.reason or 'a signal'} after step {state.done:,}. It is saved and can continue."
    if state.word == "failed":
        return f"{ending} after step {state.done:,}:\n{state.reason or 'no reason was recorded'}"
    return f"{ending} after step {state.done:,}: no end was recorded. It can continue from its last checkpoint."


def _every(settings: Json, section: str) -> int | None:
    found = settings.get(section)
    period = found.get("every") if isinstance(found, dict) else None
    return period if isinstance(period, int) and period > 0 else None


def _each_took(folder: Path, name: str, stages: dict[str, Stage]) -> float:
    """The mean seconds of each kind of interruption so far."""
    if name not in stages:
        return 0.0
    times = len(list(folder.glob(f"{SAMPLES}/*/"))) if name == "validate" else len(list_checkpoints(folder))
    return stages[name].seconds / max(1, times)


def charts_of(folder: Path, steps: int | None) -> list[str]:
    """Chart the loss, the learning rate, the gradient norm and the seconds of a step."""
    series = METRIC_ROWS.of(folder / METRICS).series
    loss = series["loss"].points
    lines = [
        ChartLine("each step", [(point.step, point.mean) for point in loss], "raw"),
        ChartLine("smoothed", [(point.step, point.smooth) for point in loss], "smooth"),
    ]
    found = [svg_lines("Loss", [*lines, *evaluation_lines(folder)], steps, wide=True)]
    for name, title in (("lr", "Learning rate"), ("grad_norm", "Gradient norm"), ("seconds", "Seconds per step")):
        dots = [(point.step, point.mean) for point in series[name].points]
        found.append(svg_lines(title, [ChartLine("", dots, "smooth")], steps))
    return [each for each in found if each]


def evaluation_lines(folder: Path) -> list[ChartLine]:
    """The validation losses with their standard errors, on held-out or training pictures."""
    rows = EVALUATION_ROWS.of(folder / EVALUATIONS).recent
    found = [row for row in rows if isinstance(row.get("eval_loss"), int | float)]
    before = read_object(folder / EVALUATION, [], expected=False).get("eval_loss")
    known = any(row["step"] == 0 for row in found) or not isinstance(before, int | float)
    dots: list[tuple[float, float]] = [] if known else [(0.0, float(before or 0))]
    errors = [0.0] * len(dots)
    for row in found:
        dots.append((row["step"], float(row["eval_loss"])))
        errors.append(error_of(row.get("eval_losses")))
    held = bool(found) and bool(found[-1].get("held_out"))
    return [ChartLine("held-out pictures" if held else "fixed samples of training", dots, "held", errors)]


def error_of(losses: object) -> float:
    """The standard error of an evaluation; 0 if it does not list its losses."""
    values = losses if isinstance(losses, list) else []
    return standard_error(values) if len(values) > 1 and all(isinstance(each, int | float) for each in values) else 0.0
