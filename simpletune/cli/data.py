"""The verb that looks at a data set: data."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.cli.config_arguments import add_config


def data(args: argparse.Namespace) -> None:
    """look at a data set before anything else: what is unusable, small, alike, and how it is cut; no weights needed"""
    from simpletune.config.load import read_config
    from simpletune.data_report.report import report
    from simpletune.system.console import note

    config, notices = read_config(args.config, args.overrides, needs_model=False)
    note(notices)
    report(config, args.out, args.json, args.pictures)


def data_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``data``."""
    add_config(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write data.html, sheet.png and data.json there")
    parser.add_argument("--json", action="store_true", help="print figures for programs")
    parser.add_argument(
        "--pictures", type=_count, default=96, metavar="N", help="on sheet and page at most (default: 96)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 2000:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 2000")
    return int(text)


VERBS = {"data": (data, data_arguments)}
