"""The disk: how much is free where, and what to say when it is full."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from simpletune.options import UserError

FULL_CODE = 6  # exit code: a disk is full, or too small for what a run needs
FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "quota is used up", errno.EFBIG: "allows no larger file"}
_FROM_RUST = re.compile(r"\(os error (\d+)\)")  # how safetensors says an errno


class DiskFull(UserError):
    """Something could not be written for want of space."""

    def __init__(self, message: str):
        super().__init__(message, FULL_CODE)


def in_words(size: float) -> str:
    """Bytes in the unit that fits, decimal places where they tell something."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def existing(path: Path) -> Path:
    """The path, or its nearest parent that exists: where it would be made."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Free space where a path is, or will be made."""
    return shutil.disk_usage(existing(path)).free


def reason_full(error: BaseException) -> str | None:
    """What kind of full disk an error means, in words; None: it means something else."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _FROM_RUST.search(str(error))):
        number = int(found[1])
    return FULL.get(number) if number is not None else None


@contextmanager
def room_for(
    what: str, place: Path, needed: int | None = None, undo: Callable[[], object] | None = None
) -> Iterator[None]:
    """Within this context a full disk is an error for the user, said with what was needed and what is free.

    Args:
        what: is being written, after "while".
        place: file or folder.
        needed: bytes.
        undo: removes what was begun, after any error.

    Raises:
        DiskFull: there was no room.
    """
    try:
        yield
    except BaseException as error:
        free = free_bytes(place)  # before what was begun is removed
        if undo is not None:
            undo()
        kind = reason_full(error) if isinstance(error, Exception) else None
        if kind is None:
            raise
        raise full(what, place, kind, needed, free) from None


def full(what: str, place: Path, kind: str, needed: int | None, free: int) -> DiskFull:
    """The error that ends a run whose disk is full."""
    wanted = "" if needed is None else f"{in_words(needed)} were needed, "
    return DiskFull(
        f"the disk of {existing(place)} {kind} while {what}: {wanted}{in_words(free)} were free. What was finished "
        "before is whole. Make room, then continue with --resume latest, or start again if there is no checkpoint yet"
    )


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, links not followed; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        total += sum(os.lstat(os.path.join(parent, name)).st_size for name in names)
    return total
