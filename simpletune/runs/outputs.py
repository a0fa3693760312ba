"""Choose where to write results, and never overwrite anything without ``--overwrite``. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from simpletune.system.atomic import remove_stale
from simpletune.system.disk import room_for
from simpletune.system.options import UserError

_NUMBERED = re.compile(r"(\d{4,})(-|$)")


def require_new(out: Path, overwrite: bool, folder: bool = False) -> None:
    """Check an ``--out``: a file must be new unless ``--overwrite`` is given; a folder must be new or empty."""
    if not os.path.lexists(out):
        return
    if folder and (not out.is_dir() or any(out.iterdir())):
        taken = "is not empty" if out.is_dir() else "is a file"
        raise UserError(f"--out: {out} {taken}. Choose another name, or remove it")
    if not folder and out.is_dir():
        raise UserError(f"--out: {out} is a folder. Name a file, such as {out / 'result'}")
    if not folder and not overwrite:
        raise UserError(f"--out: {out} exists. Choose another name, or add --overwrite")


def write_numbered(folder: Path, name: str, write: Callable[[Path], object]) -> Path:
    """Write ``NNNN-name`` atomically under the next free number of a folder; safe for concurrent processes.

    A process claims a number by creating its temporary file exclusively, which then becomes the result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    for number in count(_next_number(folder)):
        part = folder / f".{number:04d}.part"
        try:
            part.touch(exist_ok=False)
        except FileExistsError:
            continue
        with room_for(f"writing {name}", folder, undo=partial(part.unlink, missing_ok=True)):
            if any(folder.glob(f"{number:04d}-*")):  # finished by another process since the folder was listed
                part.unlink()
                continue
            write(part)
            target = folder / f"{number:04d}-{name}"
            os.replace(part, target)
            return target
    raise AssertionError("numbers do not end")


def numbered_folder(parent: Path) -> Path:
    """Create an empty folder named by the next free number; safe for concurrent processes."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(_next_number(parent)):
        try:
            (parent / f"{number:04d}").mkdir()
        except FileExistsError:
            continue
        return parent / f"{number:04d}"
    raise AssertionError("numbers do not end")


def _next_number(folder: Path) -> int:
    found = (_NUMBERED.match(entry.name) for entry in folder.iterdir())
    return 1 + max((int(match[1]) for match in found if match), default=0)


def folder_name(label: str) -> str:
    """Turn a label into a folder name."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-")
