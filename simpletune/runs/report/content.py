"""The content of a report: facts, and sections with charts and tables, for the page and the Markdown version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simpletune.system.options import Json


@dataclass(frozen=True)
class Fact:
    """One figure of the headline."""

    name: str
    value: str  # with its unit
    note: str = ""


@dataclass(frozen=True)
class ReportChart:
    name: str  # letters and dashes; unique on the page
    title: str
    says: str  # the text alternative for screen readers
    spec: Json  # in Vega-Lite; strings that begin with @ name colours of the page's theme


@dataclass(frozen=True)
class ReportTable:
    """A table; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    folded: bool = False  # collapsed on the page, because a chart shows the same data


@dataclass
class ReportSection:
    name: str  # letters and dashes; unique on the page
    title: str
    notes: list[str] = field(default_factory=list)  # paragraphs under the heading
    charts: list[ReportChart] = field(default_factory=list)
    tables: list[ReportTable] = field(default_factory=list)
    block: str = ""  # special part of the page: loss, pictures, strengths, grid, settings or none
    lines: list[str] = field(default_factory=list)  # charts as text, for the Markdown version only


@dataclass
class Report:
    title: str
    lead: str  # one sentence under the title
    about: str  # purpose of the run, in the user's words
    status: list[str]  # what is unfinished or broken; shown first
    facts: list[Fact]  # the headline
    sections: list[ReportSection]
    price: float | None = None  # dollars per hour, if known
    priced: list[tuple[str, float]] = field(default_factory=list)  # (item, seconds) to multiply by the price
    data: Json = field(default_factory=dict)  # losses, pictures and settings for the page's template and script


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
