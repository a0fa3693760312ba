"""What the scripts under inference/ share: the arguments of ``simpletune generate``, and its errors."""

from __future__ import annotations

import argparse
import sys

from simpletune.generate_arguments import add_arguments
from simpletune.options import UserError


def run_script(parser: argparse.ArgumentParser, base: bool = False) -> None:
    """Parse, draw, and exit; a user's mistake is a message, not a traceback.

    Args:
        parser: with the script's description.
        base: draw with the base model.
    """
    add_arguments(parser)
    args = parser.parse_args()
    args.base = args.base or base
    from simpletune.generate import generate

    try:
        generate(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
