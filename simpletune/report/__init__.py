"""``simpletune report RUN ...``: one self-contained HTML page, and the same in Markdown.

``recorded`` reads what a run's folder holds; ``one`` and ``several`` make sections of it (``content``); ``page`` and
``markdown`` show them; ``templates`` holds what all of the tool's pages are made from.

May import runs, config and what is below them. Training, drawing, data_report and the command line may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpletune.options import UserError
from simpletune.report.content import Report, Section
from simpletune.system.atomic import write_text
from simpletune.system.disk import DiskFull

REPORT = "report.html"


def make_report(
    folders: Sequence[Path],
    price: float | None = None,
    title: str = "",
    lead: str = "",
    names: Sequence[str] = (),
    more: Sequence[Section] = (),
) -> Report:
    """The content of a report.

    Args:
        folders: of one run, or of several that are compared with the first.
        price: of the machine, dollars an hour.
        title: of several runs' page; one run's has its name.
        lead: the sentence under the title of several runs' page.
        names: of the runs, instead of their folders'.
        more: further sections.

    Raises:
        UserError: a folder is no run.
    """
    from simpletune.report import one, several
    from simpletune.report.recorded import read_runs

    runs = read_runs(list(folders))
    for run, name in zip(runs, names, strict=False):
        run.name = name
    report = one.report_of(runs[0], price) if len(runs) == 1 else several.report_of(runs, price, title, lead)
    report.sections += more
    return report


def write_report(report: Report, file: Path) -> list[Path]:
    """Write a page and its Markdown twin.

    Args:
        report: what they hold.
        file: of the page; the twin has the ending ``.md``.

    Returns:
        Both files.

    Raises:
        UserError: the folder cannot be written.
    """
    from simpletune.report.markdown import markdown
    from simpletune.report.page import page

    contents = {file: page(report), file.with_suffix(".md"): markdown(report)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            write_text(path, text)
    except (OSError, DiskFull) as error:
        raise UserError(
            f"the report {file} cannot be written ({error}). Name another place: simpletune report RUN --out FILE"
        ) from None
    return list(contents)


def report_at_end(folder: Path) -> Path:
    """The report of a run that has just ended, into its folder.

    Returns:
        The page.
    """
    return write_report(make_report([folder]), folder / REPORT)[0]
