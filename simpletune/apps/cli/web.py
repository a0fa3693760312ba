"""The verb that serves the web pages: web."""

from __future__ import annotations

import argparse
from pathlib import Path


def web(args: argparse.Namespace) -> None:
    """open a page to start, watch and judge runs"""
    from simpletune.apps.web.server import run

    run(args)


def web_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``web``."""
    from simpletune.apps.cli.generate_arguments import RUNS_HELP
    from simpletune.apps.cli.serve import port

    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs"), help=RUNS_HELP)
    add(
        "--root",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder whose pictures and configurations the page may use; repeatable (default: the current folder)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=port, default=8100, help="port (default: 8100); 0 picks a free one")
    add("--token", action="store_true", help="ask for a token on this machine too (always for other addresses)")


VERBS = {"web": (web, web_arguments)}
