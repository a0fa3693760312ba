"""What a report is made of: sections of facts, figures and tables, which the page and the Markdown twin both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simpletune.options import Json


@dataclass(frozen=True)
class Fact:
    """One figure of the headline.

    Args:
        name: what it is.
        value: with its unit.
        note: what it is of, in a few words.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure.

    Args:
        name: letters and dashes; unique on the page.
        title: above it.
        says: what it shows, for those who cannot see it.
        spec: in Vega-Lite; strings that begin with @ are colours of the page's theme.
    """

    name: str
    title: str
    says: str
    spec: Json


@dataclass(frozen=True)
class Table:
    """Rows under a head; the first column names the row.

    Args:
        title: what it holds.
        head: of the columns.
        rows: cells as text.
        folded: whether the page shows it only when asked: a figure says the same.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    folded: bool = False


@dataclass
class Section:
    """A part of a report.

    Args:
        name: letters and dashes; unique on the page.
        title: its heading.
        notes: paragraphs under it.
        block: which special part of the page it holds: ``loss``, ``pictures``, ``settings`` or none.
        lines: figures as text, for the Markdown twin alone.
    """

    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    block: str = ""
    lines: list[str] = field(default_factory=list)


@dataclass
class Report:
    """A whole report.

    Args:
        title: of the page.
        lead: one sentence under it.
        about: what the run is for, in the user's words.
        status: what is unfinished or broken, for all to see first.
        facts: the headline.
        price: dollars an hour, or None; with it goes what is priced.
        priced: (what, seconds).
        data: what the page's script draws besides the charts: losses, pictures.
    """

    title: str
    lead: str
    about: str
    status: list[str]
    facts: list[Fact]
    sections: list[Section]
    price: float | None = None
    priced: list[tuple[str, float]] = field(default_factory=list)
    data: Json = field(default_factory=dict)


def gib(value: float | None) -> str:
    """Memory in GiB as text; small ones in MiB."""
    if value is None:
        return ""
    return f"{value:.2f} GiB" if value >= 1 else f"{value * 1024:.0f} MiB"


def seconds(value: float | None) -> str:
    """A time of a step or a stage as text."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.3g} ms" if value < 0.1 else f"{value:.3f} s"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def dollars(value: float) -> str:
    """Money as text."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.2g}"
