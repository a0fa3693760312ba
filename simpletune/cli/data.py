"""The verb that inspects a data set: data."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.cli.config_arguments import JSON_HELP, add_config


def data(args: argparse.Namespace) -> None:
    """check a data set before training: unusable, small and duplicate pictures, and crops; needs no weights"""
    from simpletune.config.load import read_config
    from simpletune.data_report.report import report
    from simpletune.system.console import note

    config, notices = read_config(args.config, args.overrides, needs_model=False)
    note(notices)
    report(config, args.out, args.json, args.pictures)


def data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``data``."""
    add_config(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write data.html, sheet.png and data.json to it")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument(
        "--pictures", type=_count, default=96, metavar="N", help="show at most N pictures (default: 96)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 2000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to 2000")
    return int(text)


VERBS = {"data": (data, data_arguments)}
