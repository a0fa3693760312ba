"""Verbs that show: report."""

from __future__ import annotations

import argparse
from pathlib import Path


def report(args: argparse.Namespace) -> None:
    """write one HTML page on a run, or on several side by side, and the same in Markdown"""
    from simpletune.report import make_report, write_report

    made = make_report(args.runs, args.price)
    default = args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html")
    for file in write_report(made, args.out or default):
        print(file)


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``report``."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder, such as runs/demo")
    parser.add_argument(
        "--out", type=_page, metavar="FILE",
        help="the page, ending in .html (default: report.html in the run's folder; of several runs, here)",
    )  # fmt: skip
    parser.add_argument("--price", type=_price, metavar="DOLLARS_PER_HOUR", help="of the machine: what the run cost")


def _page(text: str) -> Path:
    if not text.endswith(".html"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .html; the Markdown twin is written beside it")
    return Path(text)


def _price(text: str) -> float:
    value = float(text)
    if not 0 < value < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is no price of an hour in dollars. Use one above 0 and below 10000")
    return value


VERBS = {"report": (report, report_arguments)}
