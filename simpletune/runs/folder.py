"""A run's folder: opened fresh (an older run of the name is moved aside) or again (resume), its metrics and summary."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from simpletune.config.schema import TrainConfig, profile_folder, run_folder
from simpletune.options import Json, UserError
from simpletune.system.atomic import remove, write_text
from simpletune.system.console import say
from simpletune.system.disk import room_for
from simpletune.system.failpoints import failpoint

METRICS, SUMMARY, CONFIG, EVALUATION = "metrics.jsonl", "summary.json", "config.json", "eval_before.json"
EVALUATIONS, ENVIRONMENT, DATA, SKIPPED = "evaluations.jsonl", "environment.json", "data.json", "skipped.jsonl"
SAMPLES, CHECKPOINTS = "samples", "checkpoints"
CHOSEN = "chosen.json"
# What a run writes before it has saved anything; wandb keeps its own copy.
WRITTEN_FIRST = {METRICS, CONFIG, EVALUATION, EVALUATIONS, ENVIRONMENT, DATA, SKIPPED, SAMPLES, CHOSEN, "wandb"}
LEFT_OVER = re.compile(r"^\..*\.part$")


def open_fresh(config: TrainConfig) -> Path:
    """Make the run's folder. An older one is moved to NAME.1, NAME.2, ...: nothing is lost."""
    folder, traces = run_folder(config), profile_folder(config)
    if folder.exists() and any(folder.iterdir()):
        number = next(n for n in range(1, 10**6) if _is_free(folder, traces, n))
        aside = folder.with_name(f"{folder.name}.{number}")
        if traces.exists():
            os.replace(traces, traces.with_name(f"{traces.name}.{number}"))
            failpoint("run.moved-traces")
        os.replace(folder, aside)
        say(f"{folder} held an older run: moved to {aside}")
        from simpletune.runs.checkpoint import list_checkpoints  # torch; a report only reads, and starts without it

        checkpoints = list_checkpoints(aside)
        if checkpoints and not (aside / SUMMARY).exists():
            say(
                f"  it was not finished (last checkpoint: step {checkpoints[-1][0]}). To continue it instead: stop "
                f"this, move it back to {folder}, and use --resume latest"
            )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_free(folder: Path, traces: Path, number: int) -> bool:
    """Whether neither a run nor its traces lie under a number; traces alone do where a kill came between the moves."""
    taken = traces.exists() and traces.with_name(f"{traces.name}.{number}").exists()
    return not folder.with_name(f"{folder.name}.{number}").exists() and not taken


def clear_unsaved(config: TrainConfig) -> None:
    """Remove what a run left that was stopped before its first checkpoint: beginning it anew then moves nothing aside.

    A folder that holds a checkpoint, under whatever name, a result or anything that no run writes is left alone.
    """
    folder, traces = run_folder(config), profile_folder(config)
    if not folder.is_dir() or any(_is_worth_keeping(entry) for entry in folder.iterdir()):
        return
    for entry in [traces, *(entry for entry in folder.iterdir() if not entry.name.endswith("lock"))]:
        remove(entry)
        failpoint("run.cleared")


def _is_worth_keeping(entry: Path) -> bool:
    if entry.name == CHECKPOINTS:
        return any(not LEFT_OVER.match(saved.name) for saved in entry.iterdir())
    return entry.name not in WRITTEN_FIRST and not LEFT_OVER.match(entry.name) and not entry.name.endswith("lock")


def finished_steps(folder: Path) -> int | None:
    """How many steps the run had that was last finished in a folder, card and report included; None if none was."""
    summary = read_json_or_none(folder / SUMMARY)
    return summary["steps"] if summary and summary.get("complete") else None


def open_again(config: TrainConfig, step: int) -> Path:
    """The folder of a run to resume; metrics of steps that will be done again are dropped.

    Raises:
        UserError: there is no such run.
    """
    folder = run_folder(config)
    if not folder.is_dir():
        raise UserError(f"--resume: {folder} does not exist. Start without --resume, or check name")
    for name in (METRICS, EVALUATIONS, SKIPPED):
        file = folder / name
        if not file.exists() and name == SKIPPED:
            continue
        kept = [row for row in read_rows(file) if row["step"] <= step]
        write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
        failpoint("run.opened-again")
    from simpletune.runs.checkpoint import rewind  # torch, as above

    for later in rewind(folder, step, config.checkpoint.keep_last):
        say(f"  {later} is later than step {step}: it is kept under this name. Remove it if it is not wanted")
    for entry in folder.glob(".*.part"):
        remove(entry)
    for entry in (folder / SAMPLES).glob("step-*"):
        if int(entry.name[5:]) > step:
            remove(entry)
    return folder


def read_metrics(folder: Path) -> list[Json]:
    """The rows of metrics.jsonl; a last line that a killed run left half written is left out."""
    return list(read_rows(folder / METRICS))


def read_rows(file: Path) -> Iterator[Json]:
    """The rows of a file with a JSON object a line; a last line that is half written is left out."""
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except ValueError:
            if number != len(lines) - 1:
                raise


def append_metrics(folder: Path, row: Json, name: str = METRICS) -> None:
    """Add one line to metrics.jsonl or another such file; it is closed, so a reader sees the line at once.

    Raises:
        UserError: the disk is full; the file is as it was before.
    """
    file = folder / name
    size = file.stat().st_size if file.exists() else 0
    with room_for(f"writing {name}", folder, undo=lambda: _cut(file, size)):
        with open(file, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
    failpoint("metrics.appended")


def _cut(file: Path, size: int) -> None:
    """Take back what was added to a file."""
    if file.exists():
        os.truncate(file, size)


def put_evaluation(folder: Path, row: Json) -> None:
    """Keep an evaluation, in the place of one of the same step: a run that was killed after it does it again."""
    kept = [json.dumps(old) for old in read_rows(folder / EVALUATIONS) if old["step"] != row["step"]]
    write_text(folder / EVALUATIONS, "\n".join([*kept, json.dumps(row)]) + "\n")


def was_evaluated(folder: Path, step: int) -> bool:
    """Whether the evaluation loss after so many steps is known."""
    return any(row["step"] == step for row in read_rows(folder / EVALUATIONS))


def put_chosen_blocks(config: TrainConfig, chosen: TrainConfig) -> None:
    """Keep what ``memory.checkpointing: auto`` has come to, for the run's next start."""
    if config.memory.checkpointing == "auto":
        blocks = config.model.blocks()
        found = {"checkpointed": chosen.memory.checkpointed(blocks), "blocks": blocks}
        write_text(run_folder(config) / CHOSEN, json.dumps(found) + "\n")


def chosen_blocks(config: TrainConfig) -> int | None:
    """What was chosen at the run's last start; None if nothing was."""
    kept = read_json_or_none(run_folder(config) / CHOSEN)
    return kept["checkpointed"] if kept else None


def newest_run(runs: Path) -> Path:
    """The run that was finished last.

    Raises:
        UserError: there is none.
    """
    found = sorted(runs.glob(f"*/{SUMMARY}"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise UserError(f"{runs}/ holds no finished run. Train one first: ./train.sh")
    return found[-1].parent


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: a transformer's folder has a file of the same name, with other things in it."""
    file = folder / CONFIG
    return file.is_file() and '"_class_name"' not in file.read_text(encoding="utf-8", errors="replace")


def read_json_or_none(file: Path) -> Json | None:
    """A JSON file's object, or None if there is no such file."""
    return json.loads(file.read_text()) if file.exists() else None
