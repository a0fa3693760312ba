"""The verb that writes reports: report."""

from __future__ import annotations

import argparse
from pathlib import Path


def report(args: argparse.Namespace) -> None:
    """write an HTML page and a Markdown file about one run, or about several side by side"""
    from simpletune.runs.report import make_report, write_report

    made = make_report(args.runs, args.price)
    default = args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html")
    for file in write_report(made, args.out or default):
        print(file)


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, such as runs/demo")
    parser.add_argument(
        "--out", type=_page, metavar="FILE",
        help=".html file to write (default: report.html in the run's folder, or here for several runs)",
    )  # fmt: skip
    parser.add_argument("--price", type=_price, metavar="DOLLARS_PER_HOUR", help="machine price, to report the cost")


def _page(text: str) -> Path:
    if not text.endswith(".html"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .html. The Markdown file gets the same name")
    return Path(text)


def _price(text: str) -> float:
    value = float(text)
    if not 0 < value < 10_000:
        raise argparse.ArgumentTypeError(
            f"{text} dollars per hour is out of range. Use a price above 0 and below 10000"
        )
    return value


VERBS = {"report": (report, report_arguments)}
