"""Write the report as Markdown: the same facts and tables, charts as text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from simpletune.runs.report import charts
from simpletune.runs.report.content import Report, ReportSection, dollars

WIDTH = 30  # characters of the longest bar
SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#])")


def markdown(report: Report) -> str:
    lines = [f"# {escape_markdown(report.title)}", ""]
    lines += [escape_markdown(report.lead), ""] if report.lead else []
    lines += [escape_markdown(report.about), ""] if report.about else []
    lines += [f"> **{escape_markdown(note)}**\n" for note in report.status]
    if report.facts:
        lines += ["| | | |", "|---|---|---|"]
        lines += [
            f"| {escape_markdown(f.name)} | **{escape_markdown(f.value)}** | {escape_markdown(f.note)} |"
            for f in report.facts
        ]
        lines += [""]
    if report.price is not None and report.priced:
        costs = ", ".join(f"{what} {dollars(time / 3600 * report.price)}" for what, time in report.priced)
        lines += [f"At ${report.price:g} per hour: {costs}.", ""]
    for section in report.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def escape_markdown(text: str) -> str:
    """Escape Markdown and join lines: prompts and names may contain anything."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _section(section: ReportSection) -> Iterator[str]:
    yield f"## {escape_markdown(section.title)}"
    yield ""
    for note in section.notes:
        if section.block != "pictures" or "Drag" not in note:
            yield escape_markdown(note)
            yield ""
    for line in section.lines:
        yield line
        yield ""
    for chart in section.charts:
        yield from _bars(chart.spec.get("data", {}).get("values", []), chart.title)
    for table in section.tables:
        yield f"**{escape_markdown(table.title)}**"
        yield ""
        yield "| " + " | ".join(escape_markdown(cell) for cell in table.head) + " |"
        yield "|" + "---|" * len(table.head)
        for row in table.rows:
            yield "| " + " | ".join(escape_markdown(cell) for cell in row) + " |"
        yield ""


def _bars(rows: list[dict[str, object]], title: str) -> Iterator[str]:
    """Draw rows with labels as text bars; other charts have a table."""
    labelled = [row for row in rows if "label" in row]
    if not labelled:
        return
    values = [value if isinstance(value := row["value"], int | float) else 0.0 for row in labelled]
    top, wide = max(values) or 1, max(len(str(row["name"])) for row in labelled)
    if title:
        yield f"{escape_markdown(title)}:"
        yield ""
    yield "```text"
    for row, value in zip(labelled, values, strict=True):
        bar = charts.text_bar([value], top, WIDTH) or ("█" if value else "")
        yield f"{' '.join(str(row['name']).replace('`', ' ').split()):<{wide}}  {bar:<{WIDTH}}  {row['label']}"
    yield "```"
    yield ""
