"""Read everything in a run's folder, and say how the run ended and what is missing or broken."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from simpletune.config.load import read_saved
from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import ON_TRAINING
from simpletune.runs.attempts import (
    Attempt,
    median_seconds,
    merged_stages,
    read_attempts,
    total_seconds,
    with_unrecorded_steps,
)
from simpletune.runs.folder import ATTEMPTS, CONFIG, ENVIRONMENT, EVALUATION, EVALUATIONS, METRICS, SUMMARY
from simpletune.runs.repair import is_start, parse_row
from simpletune.system.locks import is_held
from simpletune.system.options import Json, UserError, plural
from simpletune.system.stage_timer import stages_as_json

NUMBERS = (
    "seconds_per_step", "samples_per_second", "steps_per_epoch", "peak_allocated_gib", "peak_rss_gib", "first_loss",
    "final_loss", "seconds_total", "seconds_setup", "trainable_parameters", "total_parameters", "eval_loss_after",
)  # fmt: skip
ABSOLUTE = re.compile(r"(?<![\w/.:])/(?:[^\s/:,;'\"]+/)+(?=[^\s/])")
NAME_A_RUN = "Name a run's folder, such as runs/demo"


@dataclass
class RunData:
    """A run as read from its files."""

    folder: Path
    name: str  # unique among the runs of one report
    settings: Json  # raw content of config.json
    config: TrainConfig | None  # parsed from settings, if this version of the tool can read them
    metrics: list[Json]  # a row for each finished step
    evaluations: list[tuple[int, float]]  # step and validation loss, at 0 the base's
    summary: Json  # summary.json; empty while the run is running, or if it was stopped
    environment: dict[str, str]  # machine and versions
    profiles: list[Json]  # summaries of the traced epochs
    attempts: list[Attempt] = field(default_factory=list)  # one for each process; empty for runs of older versions
    locked: bool = False  # whether a process has the run's folder locked now
    notes: list[str] = field(default_factory=list)  # what is missing or broken
    loss_is: str = ON_TRAINING  # name of the validation loss
    start_loss: float | None = None  # that of the LoRA that the run began with

    @property
    def steps_done(self) -> int:
        """The last step in the metrics."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def steps_of_result(self) -> int:
        """The steps that the result has seen: metrics go on beyond the checkpoint of a run that was finished early."""
        return int(self.summary.get("steps", self.steps_done))

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds per step, without the warm-up."""
        if "seconds_per_step" in self.summary:
            return self.summary["seconds_per_step"]
        return median_seconds(self.metrics, self.attempts)

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second; for an unfinished run, assuming full micro-batches."""
        if "samples_per_second" in self.summary:
            return self.summary["samples_per_second"]
        train = self.settings.get("train", {})
        batch = train.get("global_batch") or train.get("batch_size", 1) * train.get("gradient_accumulation", 1)
        return batch / self.seconds_per_step if self.seconds_per_step else None

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps per epoch from the summary, or counted once a second epoch has begun."""
        if "steps_per_epoch" in self.summary:
            return self.summary["steps_per_epoch"]
        return next((row["step"] - 1 for row in self.metrics if row.get("epoch") == 1), None)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Seconds per step times steps per epoch."""
        if self.seconds_per_step is None or self.steps_per_epoch is None:
            return None
        return self.seconds_per_step * self.steps_per_epoch

    @property
    def stages(self) -> dict[str, Json]:
        """Time and peaks by stage, over all processes; for an unfinished run, those recorded so far."""
        return self.summary.get("stages") or stages_as_json(merged_stages(self.attempts))

    @property
    def seconds_total(self) -> float | None:
        """Total time of all processes; for an unfinished run, the time so far."""
        if "seconds_total" in self.summary:
            return self.summary["seconds_total"]
        return total_seconds(self.attempts) if self.attempts else None

    @property
    def peak_key(self) -> str:
        """Key of the peak to report: the GPU's, or without a GPU the process's."""
        on_gpu = any(figures.get("peak_allocated_gib") is not None for figures in [self.summary, *self.stages.values()])
        return "peak_allocated_gib" if on_gpu else "peak_rss_gib"

    @property
    def peak_words(self) -> str:
        on_gpu = self.peak_key == "peak_allocated_gib"
        return "allocated on the GPU" if on_gpu else "resident, the whole process (no GPU)"

    @property
    def peak(self) -> float | None:
        """The peak of the whole job, in GiB."""
        peaks = [figures.get(self.peak_key) for figures in [self.summary, *self.stages.values()]]
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def share(self) -> float | None:
        """Trained parameters as a fraction of all."""
        trained, total = self.summary.get("trainable_parameters"), self.summary.get("total_parameters")
        return trained / total if trained and total else None


def read_run(folder: Path) -> RunData:
    """Read a run's folder. Raises UserError if it is not a run's."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. {NAME_A_RUN}")
    if not any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY)):
        inside = sorted(str(found.parent) for found in folder.glob(f"*/{CONFIG}"))
        hint = f"Did you mean {' '.join(inside[:8])}?" if inside else NAME_A_RUN
        raise UserError(f"{folder} is not a run: it has no {CONFIG}, {METRICS} or {SUMMARY}. {hint}")
    notes: list[str] = []
    settings = read_object(folder / CONFIG, notes)
    metrics = _read_rows(folder / METRICS, ("step", "loss"), notes)
    try:
        attempts = read_attempts(folder)
    except (ValueError, OSError) as error:
        attempts = []
        notes.append(f"{ATTEMPTS} cannot be read ({str(error).splitlines()[0]}).")
    try:
        config = read_saved(json.dumps(settings)) if settings else None
    except ValidationError as error:
        config = None
        differ = plural(error.error_count(), "field differs", "fields differ")
        notes.append(f"Another version of the tool wrote {CONFIG} ({differ}).")
    found = RunData(
        folder=folder,
        name=folder.resolve().name,
        settings=settings,
        config=config,
        metrics=metrics,
        evaluations=[],
        summary=summary_of(folder / SUMMARY, notes),
        environment=read_object(folder / ENVIRONMENT, notes, expected=False),
        profiles=_profiles(folder, settings, notes),
        attempts=with_unrecorded_steps(attempts, metrics),
        locked=is_held(folder),
        notes=notes,
    )
    if status := found.summary.get("status"):
        notes.insert(0, f"This run was {status}.")
    elif found.summary and found.summary.get("steps", 0) < found.steps_done:
        notes.append(f"{SUMMARY} is outdated, from step {found.summary['steps']}, and was ignored.")
        found.summary = {}
    notes[:0] = [] if found.summary.get("status") else state_notes(found)
    _add_evaluations(found)
    return found


def state_notes(run: RunData) -> list[str]:
    """Say whether a run is still running, was stopped or killed, or failed; nothing for a finished one."""
    last = run.attempts[-1].ended if run.attempts else None
    if last == "finished" or (run.summary and not run.attempts):
        return []
    train = run.settings.get("train", {})
    if run.summary:
        asked = run.summary["steps"]
    elif train.get("epochs"):
        asked = train["epochs"] * run.steps_per_epoch if run.steps_per_epoch else None
    else:
        asked = train.get("steps")
    of = f" of {asked:,}" if asked else ""
    steps = f"Recorded: {run.steps_done:,}{of} steps"
    if run.locked:
        return [f"This run is still running. {steps} so far."]
    if not run.attempts:
        return [f"This run is not finished, and how it ended was not recorded. {steps}."]
    attempt = run.attempts[-1]
    if attempt.ended == "failed":
        lines = without_folders(attempt.reason).splitlines() or ["no reason was recorded"]
        return [f"This run failed: {lines[0]}", *lines[1:], f"{steps}."]
    if attempt.ended == "stopped":
        return [f"This run was {attempt.describe()}. {steps}."]
    return [f"This run was killed, or its machine went down: no end was recorded. {steps}."]


def outcome(run: RunData) -> str:
    """Describe in a few words how a run ended."""
    if status := run.summary.get("status"):
        return str(status)
    if run.attempts and run.attempts[-1].ended:
        return run.attempts[-1].describe()
    if run.locked:
        return "running"
    if run.attempts:
        return "killed"
    return "finished" if run.summary else "not recorded"


def resumes(run: RunData) -> str:
    """Say how many attempts a run took and from which steps it was resumed; empty for one attempt."""
    if len(run.attempts) < 2:
        return ""
    steps = [f"{attempt.from_step:,}" for attempt in run.attempts[1:]]
    return f"{len(run.attempts)} attempts; resumed from step{'s' * (len(steps) > 1)} {', '.join(steps)}"


def without_folders(text: str) -> str:
    """Shorten absolute paths in a message to their last name, because pages are shared."""
    return ABSOLUTE.sub("…/", text)


def read_object(file: Path, notes: list[str], expected: bool = True) -> Json:
    """Read a JSON object; on failure add a note and return an empty one."""
    if not os.path.lexists(file):
        if expected:
            notes.append(f"{file.name} is missing.")
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        notes.append(f"{file.name} cannot be read ({error}).")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{file.name} cannot be read (it holds no object).")
        return {}
    return value


def summary_of(file: Path, notes: list[str]) -> Json:
    """Read summary.json; if a value has the wrong type, add a note and return an empty object."""
    summary = read_object(file, notes, expected=False)
    wrong = [key for key in NUMBERS if not isinstance(summary.get(key), int | float | None)]
    wrong += ["steps"] * (bool(summary) and type(summary.get("steps")) is not int)
    stages = summary.get("stages", {})
    figures = stages.values() if isinstance(stages, dict) else [None]
    if not all(isinstance(each, dict) and isinstance(each.get("seconds"), int | float) for each in figures):
        wrong.append("stages")
    if not wrong:
        return summary
    notes.append(f"{file.name} is damaged ({', '.join(dict.fromkeys(wrong))}) and was ignored.")
    return {}


def _read_rows(file: Path, needed: tuple[str, ...], notes: list[str]) -> list[Json]:
    """Read the intact lines of a JSON-lines file; a killed run may leave a half-written last line."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if os.path.lexists(file) else []
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error}).")
        return []
    rows = [parse_row(line, needed) for line in lines]
    if broken := sum(row is None for row in rows[:-1]):
        notes.append(f"{file.name}: ignored {plural(broken, 'line')} that cannot be read.")
    return [row for row in rows if row is not None]


def _add_evaluations(run: RunData) -> None:
    """Set the validation losses by step, from the records and the summary, and their name; a repeated step counts
    once."""
    found: dict[int, float] = {}
    first = read_object(run.folder / EVALUATION, run.notes, expected=False)
    run.loss_is = str(run.summary.get("eval_loss_is") or first.get("eval_loss_is") or ON_TRAINING)
    before = first.get("eval_loss")
    if isinstance(before, float):
        found[0] = before
    for row in _read_rows(run.folder / EVALUATIONS, ("step", "eval_loss"), run.notes):
        if is_start(row):
            run.start_loss = row["eval_loss"]
        else:
            found[row["step"]] = row["eval_loss"]
    after = run.summary.get("eval_loss_after")
    if after is not None:
        found[run.summary["steps"]] = after
    run.evaluations = sorted(found.items())


def _profiles(folder: Path, settings: Json, notes: list[str]) -> list[Json]:
    """Read the summaries of the traced epochs, in order."""
    output, here = settings.get("output", {}), folder.resolve()
    profiles, runs = Path(output.get("profiles", "profiles")), Path(output.get("runs", "runs"))
    if not profiles.is_absolute() and not runs.is_absolute():  # relative to the folder where the run was started
        profiles = (here / os.path.join(*[".."] * (1 + len(runs.parts)))).resolve() / profiles
    summaries = [read_object(file, notes) for file in sorted((profiles / here.name).glob("epoch-*/summary.json"))]
    return sorted((each for each in summaries if "epoch" in each), key=lambda each: each["epoch"])
