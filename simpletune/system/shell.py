"""Commands as a user can paste them into a shell."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from simpletune.system.portable import join_words


def to_paste(program: str, *words: object) -> str:
    """Quote a command, with the path of its program beside this Python where PATH does not lead to it: a checkout's
    ``.venv/bin/simpletune``."""
    found, beside = shutil.which(program), shutil.which(program, path=str(Path(sys.executable).parent))
    if beside is not None and (found is None or not os.path.samefile(found, beside)):
        here, place = Path.cwd(), Path(beside)
        program = str(place.relative_to(here) if place.is_relative_to(here) else place)
    return join_words([program, *map(str, words)])
