"""The content of a report: facts, and sections with charts and tables, for the page and the Markdown version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simpletune.system.options import Json


@dataclass(frozen=True)
class Fact:
    """One figure of the headline.

    Args:
        name: the figure's name.
        value: the value with its unit.
        note: details in a few words.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ReportChart:
    """A chart.

    Args:
        name: letters and dashes; unique on the page.
        title: the title above the chart.
        says: text alternative for screen readers.
        spec: the specification in Vega-Lite; strings that begin with @ name colours of the page's theme.
    """

    name: str
    title: str
    says: str
    spec: Json


@dataclass(frozen=True)
class ReportTable:
    """A table; the first column names the row.

    Args:
        title: the table's title.
        head: the columns' headings.
        rows: cells as text.
        folded: collapse it on the page, because a chart shows the same data.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    folded: bool = False


@dataclass
class ReportSection:
    """A part of a report.

    Args:
        name: letters and dashes; unique on the page.
        title: its heading.
        notes: paragraphs under the heading.
        block: special part of the page: ``loss``, ``pictures``, ``grid``, ``settings`` or none.
        lines: charts as text, for the Markdown version only.
    """

    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    charts: list[ReportChart] = field(default_factory=list)
    tables: list[ReportTable] = field(default_factory=list)
    block: str = ""
    lines: list[str] = field(default_factory=list)


@dataclass
class Report:
    """A whole report.

    Args:
        title: the page's title.
        lead: one sentence under the title.
        about: purpose of the run, in the user's words.
        status: what is unfinished or broken; shown first.
        facts: the headline.
        price: dollars per hour, if known.
        priced: (item, seconds) to multiply by the price.
        data: losses, pictures and settings for the page's template and script.
    """

    title: str
    lead: str
    about: str
    status: list[str]
    facts: list[Fact]
    sections: list[ReportSection]
    price: float | None = None
    priced: list[tuple[str, float]] = field(default_factory=list)
    data: Json = field(default_factory=dict)


def format_gib(value: float | None) -> str:
    """Format memory in GiB, small values in MiB."""
    if value is None:
        return ""
    return f"{value:.2f} GiB" if value >= 1 else f"{value * 1024:.0f} MiB"


def seconds(value: float | None) -> str:
    """Format the time of a step or a stage."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.3g} ms" if value < 0.1 else f"{value:.3f} s"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def dollars(value: float) -> str:
    """Format an amount in dollars."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.2g}"
