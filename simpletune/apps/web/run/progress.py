"""A run's progress: how far it is, the time left, coming interruptions, and what to do if it ended early."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletune.apps.web.run.series import follow
from simpletune.apps.web.run_state import RunState, state_of
from simpletune.config.validation_schedule import standard_error
from simpletune.runs.attempts import attempts_of, merged_stages
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import CONFIG, EVALUATION, EVALUATIONS, METRICS, PLANNED, PREDICTED, SAMPLES, START
from simpletune.runs.repair import is_start
from simpletune.runs.report.charts import ChartLine, svg_lines
from simpletune.runs.report.run_data import read_object
from simpletune.system.console import TrainingProgress, duration
from simpletune.system.options import Json, plural
from simpletune.system.sheets import spread_steps
from simpletune.system.shell import quote_command
from simpletune.system.stage_timer import Stage

FOLLOWED = ("loss", "lr", "grad_norm", "seconds")
EVALUATIONS_KEPT, EVALUATIONS_SHOWN = 1000, 100  # rows that are read, and those in the chart
ENDED = {"stopped": "was stopped", "failed": "failed", "killed": "was killed, or its machine went down"}


@dataclass(frozen=True)
class Progress:
    """A run's progress."""

    state: RunState  # the one on the page of all runs
    steps: int | None  # planned; None if not known yet
    pace: float | None  # median seconds of the last steps
    doing: str  # beside the steps, such as ``drawing 2 of 4 pictures``; empty while it trains
    left: str  # time; empty if unknown, and after the last step
    coming: list[str]  # interruptions, described
    stages: dict[str, Stage]
    predicted: Json  # memory by stage, as in ``estimate --json``; empty without a prediction
    trouble: str  # why it ended early, and what to do; empty otherwise
    command: str  # that fixes it; empty if nothing needs fixing

    @property
    def on_card(self) -> bool:
        """Whether a card's memory was measured."""
        return any(stage.peak_allocated_gib is not None for stage in self.stages.values())

    @property
    def peak(self) -> float:
        """GiB of the largest stage so far, of the card if it was measured, else of the process; 0 before."""
        found = (each.peak_allocated_gib if self.on_card else each.peak_rss_gib for each in self.stages.values())
        return max((each for each in found if each is not None), default=0.0)

    @property
    def running(self) -> bool:
        """Whether a process is training it now."""
        return self.state.word == "running"

    @property
    def share(self) -> int:
        """Finished steps in percent."""
        return min(100, 100 * self.state.done // self.steps) if self.steps else 0


def read_progress(folder: Path) -> Progress:
    """Read a run's progress; damaged files count as missing."""
    state, attempts = state_of(folder), attempts_of(folder)
    planned: Json = {}
    for file in (PREDICTED, PLANNED):  # the second one by earlier versions
        planned |= read_object(folder / file, [], expected=False)
    steps = planned["steps"] if isinstance(planned.get("steps"), int) else state.steps
    rows = follow(folder / METRICS, FOLLOWED).recent
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    pace = statistics.median(seconds) if seconds else None
    stages = merged_stages(attempts)
    doing = attempts[-1].doing if state.word == "running" and attempts else ""
    left, coming = "", []
    if state.word == "running" and steps and pace and 0 < state.done < steps:
        every: dict[str, int | None] = {}
        for name, section in (("save", "checkpoint"), ("validate", "validation")):
            option = state.settings.get(section)
            given = option.get("every") if isinstance(option, dict) else None
            every[name] = given if isinstance(given, int) and given > 0 else None
        validations = sum(place.name not in ("input", START) for place in folder.glob(f"{SAMPLES}/*/"))
        times = {"save": len(list_checkpoints(folder)), "validate": validations}
        took = {name: stages[name].seconds / max(1, times[name]) if name in stages else 0.0 for name in every}
        left = duration(TrainingProgress(steps, 0, every=every, took=took).seconds_left(state.done, pace))
        for name, words in (("save", "saves"), ("validate", "evaluates and draws")):
            period = every[name]
            at = min((state.done // period + 1) * period, steps) if period else steps
            coming.append(f"{words} after step {at:,}, in {duration((at - state.done) * pace)}")
    trouble = trouble_of(state)
    command = quote_command("simpletune", "train", folder / CONFIG, "--resume", "auto") if trouble else ""
    predicted = planned.get("memory", planned.get("predicted"))
    found = predicted if isinstance(predicted, dict) else {}
    return Progress(state, steps, pace, doing, left, coming, stages, found, trouble, command)


def trouble_of(state: RunState) -> str:
    """Explain why a run is not finished; empty if it is running or finished."""
    if state.word not in ENDED:
        return ""
    ending = f"This run {ENDED[state.word]}"
    if state.word == "stopped":
        return f"{ending} by {state.reason or 'a signal'} after step {state.done:,}. It is saved and can continue."
    if state.word == "failed":
        return f"{ending} after step {state.done:,}:\n{state.reason or 'no reason was recorded'}"
    return f"{ending} after step {state.done:,}: no end was recorded. It can continue from its last checkpoint."


@dataclass(frozen=True)
class Evaluation:
    """A validation loss: the mean over the same samples and noise at every evaluation."""

    loss: float
    samples: int  # 0: not known
    held_out: bool  # of pictures kept out of training, not of training's own

    @property
    def name(self) -> str:
        return "held-out loss" if self.held_out else "evaluation loss"

    def explain(self, training: float | None) -> str:
        """Say what the loss is of, and why that of the last step, ``training``, is another."""
        many = plural(self.samples, "sample") if self.samples else "samples"
        of = "pictures kept out of training" if self.held_out else "training's pictures"
        said = f"the mean over {many} of {of}, with the same noise at every evaluation"
        if training is None:
            return f"{said}."
        beside = "lower" if training < self.loss else "higher" if training > self.loss else "equal"
        return (
            f"{said}. The last step's training loss, {training:.4f}, is {beside}, but says nothing about this one: it "
            "is of that step's few pictures and noise alone."
        )


def evaluation_at(folder: Path, step: int) -> Evaluation | None:
    """Return the validation loss of a step; None if it was not evaluated."""
    rows = [row for row in follow(folder / EVALUATIONS, (), EVALUATIONS_KEPT).recent if row["step"] == step]
    if not rows or not isinstance(rows[-1].get("eval_loss"), int | float):
        return None
    losses = rows[-1].get("eval_losses")
    count = len(losses) if isinstance(losses, list) else 0
    return Evaluation(float(rows[-1]["eval_loss"]), count, bool(rows[-1].get("held_out")))


def losses_of(folders: Sequence[Path]) -> str:
    """Chart the smoothed losses of several runs; empty if none has one."""
    series = [(folder.name, follow(folder / METRICS, FOLLOWED).series["loss"].points) for folder in folders]
    return svg_lines(
        "",
        [
            ChartLine(name, [(point.step, point.smooth) for point in points], f"part{number}")
            for number, (name, points) in enumerate(series)
        ],
    )


def charts_of(folder: Path, steps: int | None) -> list[str]:
    """Chart the loss, the learning rate, the gradient norm and the seconds of a step."""
    series = follow(folder / METRICS, FOLLOWED).series
    loss = series["loss"].points
    lines = [
        ChartLine("each step", [(point.step, point.mean) for point in loss], "raw"),
        ChartLine("smoothed", [(point.step, point.smooth) for point in loss], "smooth"),
    ]
    found = [svg_lines("Loss", [*lines, *evaluation_lines(folder)], steps)]
    for name, title in (("lr", "Learning rate"), ("grad_norm", "Gradient norm"), ("seconds", "Seconds per step")):
        dots = [(point.step, point.mean) for point in series[name].points]
        found.append(svg_lines(title, [ChartLine("", dots, "smooth")], steps))
    return [each for each in found if each]


def evaluation_lines(folder: Path) -> list[ChartLine]:
    """Return the validation losses with their standard errors, on held-out or training pictures: ``EVALUATIONS_SHOWN``
    of them, evenly spaced, and the lowest."""
    rows = follow(folder / EVALUATIONS, (), EVALUATIONS_KEPT).recent
    found = [row for row in rows if isinstance(row.get("eval_loss"), int | float)]
    before = read_object(folder / EVALUATION, [], expected=False).get("eval_loss")
    known = any(row["step"] == 0 for row in found) or not isinstance(before, int | float)
    if any(is_start(row) for row in found):  # training begins with it, not with the base
        found = [row for row in found if row["step"] or is_start(row)]
    lowest = min(range(len(found)), key=lambda number: found[number]["eval_loss"], default=0)
    shown = {*spread_steps(range(len(found)), EVALUATIONS_SHOWN), lowest}
    found = [row for number, row in enumerate(found) if number in shown]
    dots: list[tuple[float, float]] = [] if known else [(0.0, float(before or 0))]
    errors = [0.0] * len(dots)
    for row in found:
        losses = row["eval_losses"] if isinstance(row.get("eval_losses"), list) else []
        listed = len(losses) > 1 and all(isinstance(each, int | float) for each in losses)
        dots.append((row["step"], float(row["eval_loss"])))
        errors.append(standard_error(losses) if listed else 0.0)
    held = bool(found) and bool(found[-1].get("held_out"))
    return [ChartLine("held-out pictures" if held else "fixed samples of training", dots, "held", errors)]
