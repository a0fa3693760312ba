"""The report as one self-contained HTML page, and the templates of this and the other pages."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from simpletune import __version__
from simpletune.runs.report.content import Report, ReportTable
from simpletune.system.package import ASSETS

if TYPE_CHECKING:
    from jinja2 import Template

PAGES_CSS = ASSETS / "pages.css"
NUMBER = re.compile(r"[-+$]?[0-9][0-9,.e+-]*(%| [A-Za-z]{1,3})?( \([^)]*\))?$")


def page_template(kind: str, **filters: Callable[..., str]) -> Template:
    """Load the template ``assets/KIND/page.html``: ``report``, ``compare`` or ``data_report``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(ASSETS / kind)
    # Escapes all that users write (prompts, names, captions); a variable that the page lacks is an error.
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(filters)
    return environment.get_template("page.html")


def page_style(*kinds: str) -> str:
    """Read the style that all pages share, then the rules of each ``assets/KIND/page.css``."""
    files = [PAGES_CSS, *(ASSETS / kind / "page.css" for kind in kinds)]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def page(report: Report) -> str:
    charts = {chart.name: chart.spec for section in report.sections for chart in section.charts}
    return page_template("report").render(
        report=report,
        charts=charts,
        style=page_style("report"),
        script=(ASSETS / "report" / "page.js").read_text(encoding="utf-8"),
        vega=vega_bundle() if charts else "",
        numeric_column=numeric_column,
        made_by=f"simpletune {__version__}",
    )


def numeric_column(table: ReportTable, column: int) -> bool:
    """Return whether a column holds numbers, which are right-aligned."""
    cells = [row[column] for row in table.rows if column < len(row) and row[column]]
    return bool(cells) and all(NUMBER.match(cell) for cell in cells)


@functools.cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, from vl-convert's copy, without the network."""
    import vl_convert

    script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE).replace("<!--", r"<\!--")
