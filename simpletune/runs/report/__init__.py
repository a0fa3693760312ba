"""``simpletune report RUN ...``: what happened in a run, on one self-contained HTML page or in Markdown?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpletune.runs.report.content import Report, ReportSection
from simpletune.system.atomic import write_text
from simpletune.system.disk import DiskFull
from simpletune.system.options import UserError

REPORT = "report.html"


def make_report(
    folders: Sequence[Path],
    price: float | None = None,
    title: str = "",
    lead: str = "",
    names: Sequence[str] = (),
    more: Sequence[ReportSection] = (),
) -> Report:
    """Build the content of a report.

    Args:
        folders: the folders of one run, or of several to compare with the first.
        price: the machine's price in dollars per hour.
        title: the title of a comparison; the report of one run has the run's name as its title.
        lead: sentence under the title of a comparison.
        names: the runs' names; default: their folders' names, or the whole paths of those with equal names.
        more: further sections.
    """
    from simpletune.runs.report.comparison import comparison_report
    from simpletune.runs.report.run_data import read_run
    from simpletune.runs.report.single_run import single_run_report

    runs = [read_run(folder) for folder in folders]
    own_names = [run.name for run in runs]
    for number, run in enumerate(runs):
        if number < len(names):
            run.name = names[number]
        elif own_names.count(run.name) > 1:
            again = folders[:number].count(run.folder)
            run.name = f"{run.folder} ({again + 1})" if again else str(run.folder)
    single = len(runs) == 1
    report = single_run_report(runs[0], price) if single else comparison_report(runs, price, title, lead)
    report.sections += more
    return report


def write_report(report: Report, file: Path) -> list[Path]:
    """Write a page and, beside it, its Markdown version; returns both files. Raises UserError if they cannot be
    written."""
    from simpletune.runs.report.markdown import markdown
    from simpletune.runs.report.page import page

    contents = {file: page(report), file.with_suffix(".md"): markdown(report)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            write_text(path, text)
    except (OSError, DiskFull) as error:
        raise UserError(
            f"the report {file} cannot be written ({error}). Choose another file: simpletune report RUN --out FILE"
        ) from None
    return list(contents)


def report_at_end(folder: Path) -> Path:
    """Write the report of a run into its folder when the run ends; returns the page."""
    return write_report(make_report([folder]), folder / REPORT)[0]
