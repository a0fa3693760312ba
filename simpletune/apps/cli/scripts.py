"""Run the scripts under inference/: each is a verb of the command line with fixed arguments."""

from __future__ import annotations

import sys

from simpletune.apps.cli.main import main


def run_verb(*words: str) -> None:
    """Run ``simpletune WORDS`` with the script's own arguments appended, and exit with its code."""
    sys.exit(main([*words, *sys.argv[1:]]))
