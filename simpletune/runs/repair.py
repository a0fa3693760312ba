"""Read a run's own files; rename damaged ones to ``NAME.damaged`` with a warning, and continue without them.

Only the first of several processes renames; the others ignore the same files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from simpletune.system.atomic import quarantine
from simpletune.system.checksums import without_sum
from simpletune.system.console import say
from simpletune.system.disk import existing_parent
from simpletune.system.options import Json, UserError, join_names
from simpletune.system.processes import is_first_process

NUMBER = (int, float)
CHANGED = "has changed since it was written (its checksum does not match)"  # a fault for ``set_aside``


def require_place(folder: Path) -> None:
    """Check that the run's folder can be written or created."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Remove it, or give this run another name: name=...")
    place = existing_parent(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(
            f"{folder} cannot be written: {place} is read-only for this user. Make it writable, or use another folder: "
            "output.runs=..."
        )


def set_aside(file: Path, fault: str) -> None:
    """Rename a damaged file or folder to ``NAME.damaged``, with a warning."""
    if is_first_process():
        say(f"warning {file} {fault}: set aside as {quarantine(file).name}")


def read_own(file: Path, needed: Mapping[str, tuple[type, ...]]) -> Json | None:
    """Read a JSON object that a run wrote, with values of the needed types; None if it is missing, or damaged and set
    aside."""
    if not os.path.lexists(file):
        return None
    if not file.is_file():
        set_aside(file, "is not a file")
        return None
    try:
        value = without_sum(dict(json.loads(file.read_text(encoding="utf-8"))))
        wrong = [key for key, types in needed.items() if type(value[key]) not in types]
    except (ValueError, KeyError, TypeError, RecursionError):
        set_aside(file, "is damaged")
        return None
    if wrong:
        set_aside(file, f"is damaged ({', '.join(wrong)})")
        return None
    return value


def read_own_rows(file: Path, needed: tuple[str, ...]) -> list[Json]:
    """Read the rows of a run's JSON Lines file, which need not exist.

    Skips a partial last line, which a kill may leave. With other damage, sets the file aside and returns the intact
    rows, one per step (and one of the start): those that have the needed numbers, ``step`` among them.
    """
    if not os.path.lexists(file):
        return []
    if not file.is_file():
        set_aside(file, "is not a file")
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    partial = lines.pop()  # empty if the last line is complete
    rows: dict[tuple[int, bool], Json] = {}
    damaged = []
    for number, line in enumerate(lines, 1):
        row = parse_row(line, needed)
        if row is None or row_key(row) in rows:
            damaged.append(number)
        else:
            rows[row_key(row)] = row
    whole = parse_row(partial, needed)
    if whole is not None:
        rows.setdefault(row_key(whole), whole)
    if damaged:
        counted = f"line{'s' * (len(damaged) > 1)} {join_names([str(number) for number in damaged], 6)}"
        set_aside(file, f"is damaged in {counted}, skipped")
    return list(rows.values())


def row_key(row: Json) -> tuple[int, bool]:
    """Return what tells a row from the others: its step, and whether it is of the start, at step 0 like the base."""
    return row["step"], is_start(row)


def is_start(row: Json) -> bool:
    """Return whether an evaluation is of the LoRA that a run began with, at step 0 as the base's."""
    return bool(row.get("start"))


def parse_row(line: str, needed: tuple[str, ...]) -> Json | None:
    """Parse a row; None if the line is not one."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            return None
        numbers = all(type(row.get(key)) in NUMBER and math.isfinite(row[key]) for key in needed)
    except (ValueError, RecursionError, OverflowError):  # OverflowError: an integer too large for isfinite
        return None
    return row if numbers else None
