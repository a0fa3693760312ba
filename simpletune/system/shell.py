"""Commands as a user can paste them into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def to_paste(program: str, *words: object) -> str:
    """Quote a command, with the path of its program beside this Python where PATH does not lead to it: a checkout's
    ``.venv/bin/simpletune``."""
    beside, found = Path(sys.executable).with_name(program), shutil.which(program)
    if beside.exists() and (found is None or not os.path.samefile(found, beside)):
        here = Path.cwd()
        program = str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
    return shlex.join([program, *map(str, words)])
