"""The report as one HTML page that needs nothing else: styles, script, figures and pictures are inside."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from simpletune import __version__
from simpletune.report.content import Report, Table

ASSETS = Path(__file__).resolve().parent.parent / "assets" / "report"
NUMBER = re.compile(r"[-+$]?[0-9][0-9,.e+-]*(%| [A-Za-z]{1,3})?( \([^)]*\))?$")


def page(report: Report) -> str:
    """The page. All text goes through Jinja's escaping: prompts and names are whatever somebody typed."""
    import jinja2

    loader = jinja2.FileSystemLoader(ASSETS)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    charts = {chart.name: chart.spec for section in report.sections for chart in section.charts}
    return environment.get_template("page.html").render(
        report=report,
        charts=charts,
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / "page.js").read_text(encoding="utf-8"),
        vega=vega_bundle() if charts else "",
        numeric_column=numeric_column,
        made_by=f"simpletune {__version__}",
    )


def numeric_column(table: Table, column: int) -> bool:
    """Whether a column holds numbers, which are set to the right."""
    cells = [row[column] for row in table.rows if column < len(row) and row[column]]
    return bool(cells) and all(NUMBER.match(cell) for cell in cells)


@functools.cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, from vl-convert's own copy: no network."""
    import vl_convert

    script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE).replace("<!--", r"<\!--")
