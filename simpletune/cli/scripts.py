"""What the scripts under inference/ are: a verb of the command line, with what each always asks for."""

from __future__ import annotations

import sys

from simpletune.cli.main import main


def run_verb(*words: str) -> None:
    """Run ``simpletune WORDS`` followed by the script's own arguments, and exit as it does."""
    sys.exit(main([*words, *sys.argv[1:]]))
