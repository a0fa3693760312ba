"""Commands as a user can paste them into a shell, and paths as a user types or pastes them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from simpletune.system.devices import is_under_wsl
from simpletune.system.options import UserError
from simpletune.system.portable import join_words

CALLED_FROM = "SIMPLETUNE_CALLED_FROM"  # set by train.sh if the user stands in another folder than the project's
DRIVE = re.compile(r"([A-Za-z]):[\\/]+(.*)", re.DOTALL)
SHARE = re.compile(r"\\\\wsl(?:\$|\.localhost)\\[^\\]+(\\.*)?", re.DOTALL)  # a distribution's files, in Explorer
SWALLOWED = re.compile(r"[A-Za-z]:[A-Za-z]\w*")  # what an unquoted path of Windows is after the shell


def quote_command(program: str, *words: object) -> str:
    """Quote a command, with the path of its program beside this Python where PATH does not lead to it: a checkout's
    ``.venv/bin/simpletune``. If ``train.sh`` was called from another folder, go to this one first."""
    found, beside = shutil.which(program), shutil.which(program, path=str(Path(sys.executable).parent))
    here = Path.cwd()
    if beside is not None and (found is None or not os.path.samefile(found, beside)):
        place = Path(beside)
        program = str(place.relative_to(here) if place.is_relative_to(here) else place)
    command = join_words([program, *map(str, words)])
    return f"{join_words(['cd', str(here)])} && {command}" if CALLED_FROM in os.environ else command


def install_command(*words: object) -> str:
    """Return the command that installs packages into this Python's environment, wherever it is."""
    return quote_command("python", "-m", "pip", "install", *words)


def login_command() -> str:
    """Return the command that stores a token of the Hugging Face hub."""
    return quote_command("hf", "auth", "login")


def wsl_path(path: str) -> str | None:
    r"""Return where WSL has a path on a drive of Windows (``C:\Users`` is ``/mnt/c/Users``); None for another path."""
    drive = DRIVE.fullmatch(path)
    return None if drive is None else f"/mnt/{drive[1].lower()}/{drive[2]}".replace("\\", "/")


def typed_path(text: str) -> str:
    r"""Read a path as a user types or pastes it: without quotes around it, with ``~`` expanded, and under WSL with a
    drive of Windows where Linux has it (``C:\Users`` is ``/mnt/c/Users``). Raises UserError for a path of Windows,
    which this machine does not have."""
    path = text.strip() if text.strip()[:1] in ("'", '"') else text
    if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"":
        path = path[1:-1]
    if os.name == "nt":
        return os.path.expanduser(path)
    if path.startswith("~"):
        return os.path.expanduser(path)
    if SWALLOWED.fullmatch(path) and not os.path.lexists(path):
        raise UserError(f"{path} is a path of Windows whose backslashes the shell removed. Put it in single quotes")
    on_drive, share = wsl_path(path), SHARE.fullmatch(path)
    if on_drive is None and share is None and not path.startswith("\\\\"):
        return path
    if is_under_wsl() and share is not None:
        return (share[1] or "/").replace("\\", "/")
    if is_under_wsl() and on_drive is not None:
        return on_drive
    raise UserError(
        f"{path} is a path of Windows, which this machine cannot open. Copy what it names to this machine, and give "
        "its path here, such as ~/pictures"
    )
