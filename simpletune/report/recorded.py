"""What a run's folder tells: everything that is there, and in words what is missing or broken."""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from simpletune.config.schema import TrainConfig
from simpletune.data.evaluation import ON_TRAINING
from simpletune.options import Json, UserError, plural
from simpletune.runs.folder import CONFIG, ENVIRONMENT, EVALUATION, EVALUATIONS, METRICS, SUMMARY

WARM_UP = 2  # steps left out of medians, as in summary.json


@dataclass
class RunRecord:
    """A run as its files tell it.

    Args:
        folder: of the run.
        name: unique among the runs of one report.
        settings: config.json as it stands.
        config: the same, if this version of the tool can read it.
        metrics: a row for each step done.
        evaluations: (step, evaluation loss).
        summary: summary.json; empty while the run goes on, or if it was stopped.
        environment: machine and versions.
        profiles: summaries of the traced epochs.
        notes: what is missing or broken.
        loss_is: what the evaluation loss is of.
    """

    folder: Path
    name: str
    settings: Json
    config: TrainConfig | None
    metrics: list[Json]
    evaluations: list[tuple[int, float]]
    summary: Json
    environment: dict[str, str]
    profiles: list[Json]
    notes: list[str] = field(default_factory=list)
    loss_is: str = ON_TRAINING

    @property
    def steps_done(self) -> int:
        """The last step in the metrics."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def steps_asked(self) -> int | None:
        """How many steps the run was to have, if that is known."""
        train = self.settings.get("train", {})
        if self.summary:
            return self.summary["steps"]
        if train.get("epochs") and self.steps_per_epoch:
            return train["epochs"] * self.steps_per_epoch
        return None if train.get("epochs") else train.get("steps")

    @property
    def seconds_per_step(self) -> float | None:
        """Median, without the warm-up."""
        if "seconds_per_step" in self.summary:
            return self.summary["seconds_per_step"]
        times = [row["seconds"] for row in self.metrics if "seconds" in row]
        return statistics.median(times[WARM_UP:] or times) if times else None

    @property
    def samples_per_second(self) -> float | None:
        """Pictures a second; of an unfinished run those of one process."""
        if "samples_per_second" in self.summary:
            return self.summary["samples_per_second"]
        train = self.settings.get("train", {})
        batch = train.get("batch_size", 1) * train.get("gradient_accumulation", 1)
        return batch / self.seconds_per_step if self.seconds_per_step else None

    @property
    def steps_per_epoch(self) -> int | None:
        """From the summary, or counted once a second epoch has begun."""
        if "steps_per_epoch" in self.summary:
            return self.summary["steps_per_epoch"]
        return next((row["step"] - 1 for row in self.metrics if row.get("epoch") == 1), None)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Seconds a step times the steps of an epoch."""
        if self.seconds_per_step is None or self.steps_per_epoch is None:
            return None
        return self.seconds_per_step * self.steps_per_epoch

    @property
    def stages(self) -> dict[str, Json]:
        """Time and peaks by stage."""
        return self.summary.get("stages", {})

    @property
    def peak_key(self) -> str:
        """Which peak stands for the run: the GPU's, or without one the process's."""
        on_gpu = self.summary.get("peak_allocated_gib") is not None
        return "peak_allocated_gib" if on_gpu else "peak_rss_gib"

    @property
    def peak_words(self) -> str:
        """What that peak is of."""
        return (
            "allocated on the GPU" if self.peak_key == "peak_allocated_gib" else "resident, the whole process (no GPU)"
        )

    @property
    def peak(self) -> float | None:
        """The peak of the whole job, in GiB."""
        return self.summary.get(self.peak_key)

    @property
    def peak_stage(self) -> str:
        """The stage in which it was."""
        peaks = {name: figures.get(self.peak_key) or 0.0 for name, figures in self.stages.items()}
        return max(peaks, key=lambda name: peaks[name], default="")

    @property
    def share(self) -> float | None:
        """Trained parameters as a part of all."""
        trained, total = self.summary.get("trainable_parameters"), self.summary.get("total_parameters")
        return trained / total if trained and total else None


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder.

    Args:
        folder: such as ``runs/demo``.

    Raises:
        UserError: the folder is no run.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Name a run's folder, such as runs/demo")
    if not any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY)):
        inside = sorted(str(found.parent) for found in folder.glob(f"*/{CONFIG}"))
        hint = f". Did you mean {' '.join(inside[:8])}?" if inside else ": name a run's folder, such as runs/demo"
        raise UserError(f"{folder} holds neither {CONFIG} nor {METRICS} nor {SUMMARY} of a run{hint}")
    notes: list[str] = []
    settings = _read_object(folder / CONFIG, notes)
    metrics = _read_rows(folder / METRICS, ("step", "loss"), notes)
    found = RunRecord(
        folder=folder,
        name=folder.resolve().name,
        settings=settings,
        config=_config(settings, notes),
        metrics=metrics,
        evaluations=[],
        summary=_read_object(folder / SUMMARY, notes, expected=False),
        environment=_read_object(folder / ENVIRONMENT, notes, expected=False),
        profiles=_profiles(folder, settings, notes),
        notes=notes,
    )
    if found.summary and found.summary.get("steps", 0) < found.steps_done:
        notes.append(f"{SUMMARY} is of an earlier end, at step {found.summary['steps']}: it is left out.")
        found.summary = {}
    if not found.summary:
        notes.insert(0, _unfinished(found))
    found.evaluations = _evaluations(folder, found, notes)
    return found


def read_runs(folders: list[Path]) -> list[RunRecord]:
    """Read several runs; names that would be the same are told apart by their folders.

    Raises:
        UserError: one of them is no run.
    """
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for number, run in enumerate(runs):
        if names.count(run.name) > 1:
            again = folders[:number].count(run.folder)
            run.name = f"{run.folder} ({again + 1})" if again else str(run.folder)
    return runs


def _unfinished(run: RunRecord) -> str:
    of = f" of {run.steps_asked:,}" if run.steps_asked else ""
    return (
        f"This run has no {SUMMARY}: it is still going, or it was stopped. {run.steps_done:,}{of} steps are recorded; "
        "peaks and times by stage are written at a run's end."
    )


def _read_object(file: Path, notes: list[str], expected: bool = True) -> Json:
    """A JSON object, or an empty one and a note."""
    if not file.exists():
        if expected:
            notes.append(f"{file.name} is missing.")
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        notes.append(f"{file.name} cannot be read ({error}).")
        return {}
    return value if isinstance(value, dict) else {}


def _read_rows(file: Path, needed: tuple[str, ...], notes: list[str]) -> list[Json]:
    """The readable lines of a file of JSON lines; a half-written last line is expected of a killed run."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    rows, broken = [], 0
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            whole = isinstance(row, dict) and all(isinstance(row.get(key), int | float) for key in needed)
        except ValueError:
            whole = False
        if whole and all(math.isfinite(row[key]) for key in needed):
            rows.append(row)
        else:
            broken += number != len(lines) - 1
    if broken:
        gone = plural(broken, "line is", "lines are")
        notes.append(f"{gone} left out: what {file.name} holds there cannot be read.")
    return rows


def _config(settings: Json, notes: list[str]) -> TrainConfig | None:
    if not settings:
        return None
    try:
        return TrainConfig.model_validate_json(json.dumps(settings))
    except ValidationError as error:
        differ = plural(error.error_count(), "field differs", "fields differ")
        notes.append(f"{CONFIG} is of another version of the tool ({differ}).")
        return None


def _evaluations(folder: Path, run: RunRecord, notes: list[str]) -> list[tuple[int, float]]:
    """Evaluation losses by step: as recorded, and those of the summary; a step that was repeated counts once."""
    found: dict[int, float] = {}
    first = _read_object(folder / EVALUATION, notes, expected=False)
    run.loss_is = str(run.summary.get("eval_loss_is") or first.get("eval_loss_is") or ON_TRAINING)
    before = first.get("eval_loss")
    if isinstance(before, float):
        found[0] = before
    for row in _read_rows(folder / EVALUATIONS, ("step", "eval_loss"), notes):
        found[row["step"]] = row["eval_loss"]
    after = run.summary.get("eval_loss_after")
    if after is not None:
        found[run.summary["steps"]] = after
    return sorted(found.items())


def _profiles(folder: Path, settings: Json, notes: list[str]) -> list[Json]:
    """Summaries of the traced epochs, by epoch."""
    found = []
    for file in sorted(profile_folder_of(folder, settings).glob("epoch-*/summary.json")):
        summary = _read_object(file, notes)
        if "epoch" in summary:
            found.append(summary)
    return sorted(found, key=lambda summary: summary["epoch"])


def profile_folder_of(folder: Path, settings: Json) -> Path:
    """Where a run's traces are: under output.profiles, as seen from where the run was started."""
    output = settings.get("output", {})
    profiles, runs = Path(output.get("profiles", "profiles")), Path(output.get("runs", "runs"))
    if profiles.is_absolute() or runs.is_absolute():
        return profiles / folder.resolve().name
    started_in = folder.resolve() / os.path.join(*[".."] * (1 + len(runs.parts)))
    return started_in.resolve() / profiles / folder.resolve().name
