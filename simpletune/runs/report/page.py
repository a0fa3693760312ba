"""Write the report as one self-contained HTML page with styles, script, charts and pictures."""

from __future__ import annotations

import functools
import re

from simpletune import __version__
from simpletune.runs.report.content import Report, ReportTable
from simpletune.runs.report.templates import page_template
from simpletune.system.package import ASSETS

NUMBER = re.compile(r"[-+$]?[0-9][0-9,.e+-]*(%| [A-Za-z]{1,3})?( \([^)]*\))?$")


def page(report: Report) -> str:
    """Render the page."""
    charts = {chart.name: chart.spec for section in report.sections for chart in section.charts}
    return page_template("report").render(
        report=report,
        charts=charts,
        style=(ASSETS / "report" / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / "report" / "page.js").read_text(encoding="utf-8"),
        vega=vega_bundle() if charts else "",
        numeric_column=numeric_column,
        made_by=f"simpletune {__version__}",
    )


def numeric_column(table: ReportTable, column: int) -> bool:
    """Whether a column holds numbers, which are right-aligned."""
    cells = [row[column] for row in table.rows if column < len(row) and row[column]]
    return bool(cells) and all(NUMBER.match(cell) for cell in cells)


@functools.cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, from vl-convert's copy, without the network."""
    import vl_convert

    script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE).replace("<!--", r"<\!--")
