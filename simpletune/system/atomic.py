"""Write files and folders atomically: under a temporary name, flushed, then renamed.

The temporary name is ``.NAME.part``; if several processes may write the same target, it also names the writer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from simpletune.system.disk import room_for
from simpletune.system.portable import flush_to_disk, replace

STALE = 3600  # seconds after which another machine's unfinished work counts as abandoned
_SHARED = re.compile(r"^\..*\.([0-9a-f]{6})-(\d{1,9})\.part$")


def machine_name() -> str:
    """Name this machine or container briefly."""
    # Process IDs are unique only within one; Windows and its WSL have the same host name.
    return hashlib.sha256(f"{os.name} {socket.gethostname()}".encode()).hexdigest()[:6]


def temporary_path(target: Path, shared: bool = False) -> Path:
    """Return the temporary path of a target; ``shared``: other processes may write it at the same time."""
    writer = f".{machine_name()}-{os.getpid()}" if shared else ""
    return target.with_name(f".{target.name}{writer}.part")


@contextmanager
def atomic_file(file: Path, needed: int | None = None, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write ``file`` to; flush and rename it when the block succeeds. Raises DiskFull, whose
    message names the bytes ``needed``. ``shared``: other processes may write the same target at the same time."""
    part = temporary_path(file, shared)
    with room_for(f"writing {file.name}", file.parent, needed, lambda: part.unlink(missing_ok=True)):
        yield part
        flush_to_disk(part)
        replace(part, file)


@contextmanager
def atomic_folder(folder: Path, what: str | None = None, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces ``folder`` when the block succeeds.

    Args:
        folder: target; an older folder is removed last, and restored if the rename fails.
        what: activity, for the message if the disk is full.
        needed: bytes needed, for the same message.

    Raises:
        DiskFull: the disk is full; the target is unchanged.
    """
    part, old = temporary_path(folder), folder.with_name(f".{folder.name}.old.part")
    remove(part)
    with room_for(what or f"writing {folder.name}/", folder.parent, needed, lambda: remove(part)):
        part.mkdir(parents=True)
        yield part
        remove(old)
        if folder.exists():
            replace(folder, old)
        try:
            replace(part, folder)
        except OSError:
            if old.exists():
                replace(old, folder)
            raise
        remove(old)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder like ``atomic_folder``, but never replace content; safe for concurrent processes. Raises
    FileExistsError if the folder is not empty, now or when the content is ready."""
    _refuse_if_filled(folder)
    part = temporary_path(folder, shared=True)
    remove(part)
    part.mkdir(parents=True)
    try:
        yield part
        _refuse_if_filled(folder)
        try:
            os.replace(part, folder)
        except PermissionError:  # Windows does not rename over a folder, not even an empty one
            folder.rmdir()
            os.replace(part, folder)
    finally:
        remove(part)


def _refuse_if_filled(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty and was not overwritten. Remove it or name another.")


def write_text(file: Path, text: str, shared: bool = False) -> None:
    """Write a text file atomically; ``shared`` as for ``atomic_file``."""
    with atomic_file(file, len(text), shared) as part:
        part.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on every system


def write_json(file: Path, value: Any, shared: bool = False) -> None:
    """Write an indented JSON file atomically; ``shared`` as for ``atomic_file``."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n", shared)


def quarantine(place: Path) -> Path:
    """Rename a damaged file or folder to ``NAME.damaged`` for inspection, replacing an older one; return that path."""
    damaged = place.with_name(f"{place.name}.damaged")
    if place.is_dir() or damaged.is_dir():  # the renaming replaces only a file, by a file
        remove(damaged)
    replace(place, damaged)
    return damaged


def remove_stale(folder: Path, name: str = "*") -> None:
    """Remove unfinished files of killed processes from a folder, but not those of running ones; ``name``: a pattern."""
    for entry in folder.glob(f".{name}.part") if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if is_abandoned(entry):
                remove(entry)


def is_abandoned(part: Path) -> bool:
    """Return whether the process that was writing an unfinished file has ended; if it is not known, whether the file
    has not changed for ``STALE`` seconds. Raises FileNotFoundError if it is gone."""
    import psutil

    match = _SHARED.match(part.name)
    if match and match[1] == machine_name():
        return not psutil.pid_exists(int(match[2]))
    return time.time() - part.stat().st_mtime > STALE


def remove(entry: Path) -> None:
    """Remove a file or folder, if it exists."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
