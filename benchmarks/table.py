"""A grid's rows in a JSON file, and as a Markdown table with the machine and the versions that made it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from simpletune.options import UserError
from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.environment import describe_machine

Row = TypeVar("Row")


class Results:
    """Rows by name, kept in a JSON file as they are measured.

    Args:
        stem: path of the files without their endings.
        columns: keys of the rows that the table shows, and their titles.
    """

    def __init__(self, stem: Path, columns: Mapping[str, str]):
        self.stem, self.columns = stem, columns
        self.rows: dict[str, dict[str, Any]] = (read_json_or_none(stem.with_suffix(".json")) or {}).get("rows", {})

    def lacks(self, name: str) -> bool:
        """Whether a row is still to be measured."""
        return name not in self.rows

    def missing(self, rows: Mapping[str, Row], minutes: float, only: str = "") -> Iterator[tuple[str, Row]]:
        """Rows that are still to be measured, until the time is up.

        Args:
            rows: of the whole grid, by name.
            minutes: no row is begun after so many.
            only: names must hold this.

        Raises:
            UserError: no row's does.
        """
        if not any(only in name for name in rows):
            raise UserError(f"--rows: none of the {len(rows)} rows holds {only!r}: {'; '.join(rows)}")
        started = time.monotonic()
        for name, row in rows.items():
            if only not in name or not self.lacks(name):
                continue
            if time.monotonic() - started > 60 * minutes:
                say("bench   time is up; the same command goes on with the next row")
                break
            yield name, row

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Keep a row, on disk too."""
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
            title: of the page.
            about: what the rows are.
            machine: hardware and versions.
            more: titles of further tables, and their columns; a row whose ``table`` is such a title goes there.

        Returns:
            Its file.
        """
        more = more or {}
        rest = {name: row for name, row in self.rows.items() if row.get("table") not in more}
        lines = [f"# {title}", "", about, "", *(f"- {name}: {value}" for name, value in machine.items()), ""]
        lines += table(self.columns, rest)
        for heading, columns in more.items():
            rows = {name: row for name, row in self.rows.items() if row.get("table") == heading}
            lines += ["", f"## {heading}", "", *table(columns, rows)] if rows else []
        file = self.stem.with_suffix(".md")
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file


def table(columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: the rows' names, and of each row what the columns after the first name."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for name, row in rows.items():
        lines.append("| " + " | ".join([name, *(shown(row.get(key)) for key in list(columns)[1:])]) + " |")
    return lines


def shown(value: Any) -> str:
    """A cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
