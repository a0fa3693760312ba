"""What the scripts under inference/ share: arguments, the project's settings, and errors without tracebacks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from simpletune.devices import prepare_environment
from simpletune.generate_arguments import add_arguments, add_compare_arguments
from simpletune.options import UserError


def draw_one(description: str, kind: str | None = None) -> None:
    """Draw one picture.

    Args:
        description: of the script.
        kind: ``base`` or ``full`` for scripts that always draw with these.
    """
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    args = parser.parse_args()
    if kind is not None:
        setattr(args, kind, True)
    _run(lambda: _generate(args))


def draw_many(description: str) -> None:
    """Draw the same pictures with several models."""
    parser = argparse.ArgumentParser(description=description)
    add_compare_arguments(parser)
    args = parser.parse_args()
    _run(lambda: _compare(args))


def _generate(args: argparse.Namespace) -> None:
    from simpletune.generate import generate

    generate(args)


def _compare(args: argparse.Namespace) -> None:
    from simpletune.compare import compare

    compare(args)


def _run(job: Callable[[], None]) -> None:
    prepare_environment()
    try:
        job()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
