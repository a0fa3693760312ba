"""A run's state in a few figures, read cheaply from the ends of its files."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from simpletune.runs.attempts import attempts_of
from simpletune.runs.folder import ATTEMPTS, CONFIG, EVALUATIONS, METRICS, SAMPLES, SUMMARY
from simpletune.runs.repair import parse_row
from simpletune.runs.report.run_data import read_object, summary_of
from simpletune.system.locks import is_held
from simpletune.system.options import Json
from simpletune.system.strict_json import read

STAMPED = (METRICS, SUMMARY, ATTEMPTS, EVALUATIONS, SAMPLES, CONFIG)
TAIL = 4096  # bytes: more than the longest row of metrics
Runs = Sequence[tuple[Path, bool]]
"""Folders of all runs, and whether a process trains each: one list for all pages' stamps."""


@dataclass(frozen=True)
class RunState:
    """A run's state."""

    name: str  # its folder's
    word: str  # running, finished, stopped, failed, killed or new
    reason: str  # why it ended, if it did not finish
    done: int  # finished steps
    steps: int | None  # planned; None if the configuration does not say
    loss: float | None  # of the last step; None before the first
    settings: Json  # its configuration; empty if it is missing or damaged
    image: str | None  # ``newest_image``, relative to the run's folder
    summary: Json  # of a finished run; empty if it is missing or damaged
    notes: tuple[str, ...]  # which files are damaged


def state_of(folder: Path) -> RunState:
    """Read the state of a run; damaged files count as missing, with a note."""
    notes: list[str] = []
    row = last_row(folder / METRICS)
    summary, settings = summary_of(folder / SUMMARY, notes), read_object(folder / CONFIG, notes, expected=False)
    if is_held(folder):
        word, reason = "running", ""
    elif attempts := attempts_of(folder):
        word, reason = attempts[-1].ended or "killed", attempts[-1].reason
    else:
        word, reason = "finished" if summary else "new", ""
    train = settings.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    steps = summary.get("steps") or (planned if isinstance(planned, int) else None)
    newest = newest_image(folder / SAMPLES)
    image = None if newest is None else newest.relative_to(folder).as_posix()
    return RunState(
        folder.name, word, reason, row.get("step", 0), steps, row.get("loss"), settings, image, summary, tuple(notes)
    )


def newest_image(folder: Path) -> Path | None:
    """Find the first prompt's picture of the newest step, else of the base, else the newest sheet."""
    steps = sorted(folder.glob("step-*/"), key=lambda step: (len(step.name), step.name), reverse=True)
    for place in (*steps, folder / "base"):
        if images := sorted(place.glob("prompt-*.png")):
            return images[0]
    sheets = [(stamp, file) for file in folder.glob("*.png") if (stamp := file_stamp(file))]
    return max(sheets)[1] if sheets else None


def last_row(file: Path) -> Json:
    """Return the last complete row of a JSON Lines file; empty if there is none."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL))
            lines = opened.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        row = parse_row(line.decode("utf-8", errors="replace"), ("step", "loss"))
        if row is not None:  # else empty, still being written, or damaged
            return row
    return {}


def json_object(file: Path) -> Json:
    """Read a JSON object; empty if the file is missing or damaged."""
    try:
        found = read(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def stamp(folder: Path, held: bool) -> Hashable:
    """Return a value that changes whenever a page about a run, which a process trains or not, would look different."""
    return (*(file_stamp(folder / name) for name in STAMPED), held)


def stamps_in(folder: Path) -> dict[str, Hashable]:
    """Return each file's stamp in a folder, by name; empty if there is no folder."""
    found: dict[str, Hashable] = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it is being replaced
                status = entry.stat()
                found[entry.name] = status.st_mtime_ns, status.st_size
    return found


def file_stamp(file: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file or a folder's entries do; None if it is missing."""
    try:
        found = file.stat()
    except (OSError, ValueError):  # a null byte in its name
        return None
    return found.st_mtime_ns, found.st_size
