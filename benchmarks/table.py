"""Store a grid's rows in a JSON file, and write them as a Markdown table with command, machine and versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.environment import describe_machine
from simpletune.system.options import Json, UserError

Row = TypeVar("Row")


def no_such_row(rows: Collection[str], only: str) -> UserError:
    """The error of ``--rows`` when no row name contains its text."""
    return UserError(f"--rows: none of the {len(rows)} rows contains {only!r}. Use part of a name: {'; '.join(rows)}")


def selected(rows: Collection[str], only: str) -> list[str]:
    """List the rows that ``--rows`` names, in their own order.

    Args:
        rows: names of all rows.
        only: names, or parts of names, separated by ``;``. A row's whole name selects that row alone.

    Raises:
        UserError: a part selects no row.
    """
    chosen: set[str] = set()
    for part in only.split(";"):
        part = part.strip()
        found = {part} if part in rows else {name for name in rows if part in name}
        if not found:
            raise no_such_row(rows, part)
        chosen |= found
    return [name for name in rows if name in chosen]


class Results:
    """Rows by name, saved to a JSON file as they are measured.

    Args:
        stem: path of the files without suffix.
        columns: keys of the columns, and their titles.
        words: of the command that measures them; None: the grid is named as the files are.
    """

    def __init__(self, stem: Path, columns: Mapping[str, str], words: str | None = None):
        self.stem, self.columns = stem, columns
        self.command = command_of(stem.name.replace("_", "-") if words is None else words)
        self.rows: dict[str, dict[str, Any]] = (read_json_or_none(stem.with_suffix(".json")) or {}).get("rows", {})

    def lacks(self, name: str) -> bool:
        """Whether a row is still to be measured."""
        return name not in self.rows

    def missing(self, rows: Mapping[str, Row], minutes: float, only: str = "") -> Iterator[tuple[str, Row]]:
        """Yield the rows that are still to be measured, until the time is up.

        Args:
            rows: of the whole grid, by name.
            minutes: start no row after this many.
            only: row names or parts of them, separated by ``;``.

        Raises:
            UserError: a part of ``only`` selects no row.
        """
        started = time.monotonic()
        for name in selected(rows, only):
            if not self.lacks(name):
                continue
            if time.monotonic() - started > 60 * minutes:
                say("bench   time is up; run the same command again to continue")
                break
            yield name, rows[name]

    def measure(
        self,
        rows: Mapping[str, Callable[[], Json]],
        minutes: float,
        only: str = "",
        told: Callable[[Json], str] | None = None,
    ) -> None:
        """Measure and add the rows that are missing, until the time is up.

        Args:
            rows: of the whole grid, by name, and what measures each.
            minutes: start no row after this many.
            only: row names or parts of them, separated by ``;``.
            told: a row's figures for the line that is printed after it.

        Raises:
            UserError: a part of ``only`` selects no row.
        """
        for name, row in self.missing(rows, minutes, only):
            self.add(name, row())
            say(f"bench   {name}" + (f": {told(self.rows[name])}" if told else ""))

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Add a row and save it to disk."""
        self.rows[name] = row
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.stem.with_suffix(".json"), {"machine": describe_machine(), "rows": self.rows})

    def write_table(
        self,
        title: str,
        about: str,
        machine: Mapping[str, str],
        more: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Path:
        """Write the Markdown table.

        Args:
            title: title of the page.
            about: description of the rows.
            machine: hardware and versions.
            more: titles of further tables, and their columns; a row belongs to the table that its ``table`` names.

        Returns:
            The file.
        """
        more = more or {}
        rest = {name: row for name, row in self.rows.items() if row.get("table") not in more}
        lines = [f"# {title}", "", about, "", *listed(self.command, machine), ""]
        lines += table(self.columns, rest)
        for heading, columns in more.items():
            rows = {name: row for name, row in self.rows.items() if row.get("table") == heading}
            lines += ["", f"## {heading}", "", *table(columns, rows)] if rows else []
        file = self.stem.with_suffix(".md")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file


def command_of(words: str) -> str:
    """The command that measures a grid, given what follows ``python -m benchmarks``."""
    return f"python -m benchmarks {words}"


def prompted(grid: str, count: int) -> str:
    """A grid's word, and the number of prompts per score if it is not the default."""
    return grid if count == 100 else f"{grid} --prompts {count}"


def listed(command: str, machine: Mapping[str, str]) -> list[str]:
    """What a page says of its making: the command, hardware and versions."""
    return [f"- command: `{command}`", *(f"- {name}: {value}" for name, value in machine.items())]


def table(columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Format rows as a Markdown table; the first column has the rows' names."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for name, row in rows.items():
        lines.append("| " + " | ".join([name, *(shown(row.get(key)) for key in list(columns)[1:])]) + " |")
    return lines


def shown(value: Any) -> str:
    """Format a cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
