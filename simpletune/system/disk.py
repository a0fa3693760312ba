"""Measure disk space, and explain a full disk."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from simpletune.system.options import UserError

FULL_CODE = 6  # exit code: a disk is full, or too small for what a run needs
FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "quota is used up", errno.EFBIG: "allows no larger file"}
_FROM_RUST = re.compile(r"\(os error (\d+)\)")  # an errno in an error of safetensors


class DiskFull(UserError):
    """The error of a file that could not be written for lack of space."""

    def __init__(self, message: str):
        super().__init__(message, FULL_CODE)


def format_bytes(size: float) -> str:
    """Format bytes in a suitable unit, with decimals if useful."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def existing_parent(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def free_disk_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist."""
    return shutil.disk_usage(existing_parent(path)).free


def describe_full_disk(error: BaseException) -> str | None:
    """Describe what kind of full disk an error reports; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _FROM_RUST.search(str(error))):
        number = int(found[1])
    return FULL.get(number) if number is not None else None


@contextmanager
def room_for(
    what: str, place: Path, needed: int | None = None, undo: Callable[[], object] | None = None
) -> Iterator[None]:
    """Turn a full disk into an error for the user within this context, with the bytes needed and free.

    Args:
        what: activity, follows "while" in the message.
        place: file or folder.
        needed: bytes needed.
        undo: removes partial output after any error.

    Raises:
        DiskFull: the disk is full.
    """
    try:
        yield
    except BaseException as error:
        free = free_disk_bytes(place)  # measured before undo frees space
        if undo is not None:
            undo()
        kind = describe_full_disk(error) if isinstance(error, Exception) else None
        if kind is None and isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, f"{error.strerror} while {what}", str(existing_parent(place))) from error
        if kind is None:
            raise
        wanted = "" if needed is None else f"{format_bytes(needed)} were needed, "
        raise DiskFull(
            f"the disk of {existing_parent(place)} {kind} while {what}: {wanted}{format_bytes(free)} were free. "
            "Finished files are intact. Free some space, then continue with --resume latest, or start again if there "
            "is no checkpoint yet"
        ) from None
