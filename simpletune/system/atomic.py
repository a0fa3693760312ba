"""Files and folders that are whole or not there: written under a temporary name, then renamed; files are flushed.

The temporary name is ``.NAME.part``; where several processes may write the same target, it also names its writer.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simpletune.system.disk import room_for

STALE = 3600  # seconds after which another machine's unfinished work is abandoned
_SHARED = re.compile(r"^\..*\.([0-9a-f]{6})-(\d+)\.part$")


def _machine() -> str:
    """A short name for this machine or container: process numbers mean something on one only."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def temporary_path(target: Path, shared: bool = False) -> Path:
    """Where to write what will be renamed to ``target``.

    Args:
        target: file or folder.
        shared: whether other processes may write the same target at the same time.
    """
    writer = f".{_machine()}-{os.getpid()}" if shared else ""
    return target.with_name(f".{target.name}{writer}.part")


@contextmanager
def atomic_file(file: Path, needed: int | None = None, shared: bool = False) -> Iterator[Path]:
    """Write a file under the temporary path that this yields; it is flushed and renamed when the block ends well.

    Args:
        file: the target; an older one is replaced.
        needed: bytes, for the message when the disk is full.
        shared: whether other processes may write the same target at the same time.

    Raises:
        DiskFull: there was no room; the target is as it was.
    """
    part = temporary_path(file, shared)
    with room_for(f"writing {file.name}", file.parent, needed, lambda: part.unlink(missing_ok=True)):
        yield part
        flush_to_disk(part)
        os.replace(part, file)


@contextmanager
def atomic_folder(folder: Path, what: str | None = None, needed: int | None = None) -> Iterator[Path]:
    """Fill a folder under the temporary path that this yields; it replaces ``folder`` when the block ends well.

    Args:
        folder: the target; an older one is removed once the new one has its name.
        what: is being written, for the message when the disk is full.
        needed: bytes, for the same message.

    Raises:
        DiskFull: there was no room; the target is as it was.
    """
    part = temporary_path(folder)
    remove(part)
    with room_for(what or f"writing {folder.name}/", folder.parent, needed, lambda: remove(part)):
        part.mkdir(parents=True)
        yield part
        replace_folder(part, folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """As ``atomic_folder``, but never replace what is there; several processes may try at once.

    Args:
        folder: must not exist, or be an empty folder.

    Raises:
        FileExistsError: the folder holds something already, now or by the time the content is ready.
    """
    _refuse_if_filled(folder)
    part = temporary_path(folder, shared=True)
    remove(part)
    part.mkdir(parents=True)
    try:
        yield part
        _refuse_if_filled(folder)
        os.replace(part, folder)
    finally:
        remove(part)


def _refuse_if_filled(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: nothing is overwritten. Remove it or name another.")


def write_text(file: Path, text: str, shared: bool = False) -> None:
    """Write a text file, whole or not at all; ``shared`` as for ``atomic_file``."""
    with atomic_file(file, len(text), shared) as part:
        part.write_text(text, encoding="utf-8")


def write_json(file: Path, value: Any, shared: bool = False) -> None:
    """Write a JSON file, indented, whole or not at all; ``shared`` as for ``atomic_file``."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n", shared)


def replace_folder(part: Path, folder: Path) -> None:
    """Rename a finished folder over an older one, which is removed last and put back if the renaming fails."""
    old = folder.with_name(f".{folder.name}.old.part")
    remove(old)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(part, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    remove(old)


def quarantine(place: Path) -> Path:
    """Rename a damaged file or folder to ``NAME.damaged``, replacing an older one: it can be looked at, and is not
    read again.

    Returns:
        Its new name.
    """
    damaged = place.with_name(f"{place.name}.damaged")
    remove(damaged)
    os.replace(place, damaged)
    return damaged


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder; what a living one writes stays."""
    for entry in folder.glob(".*.part") if folder.is_dir() else ():
        if _is_abandoned(entry):
            remove(entry)


def remove(entry: Path) -> None:
    """Remove a file or a folder; one that is gone already is no error."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _is_abandoned(entry: Path) -> bool:
    match = _SHARED.match(entry.name)
    if match and match[1] == _machine():
        return int(match[2]) != os.getpid() and not Path(f"/proc/{match[2]}").exists() and Path("/proc/self").exists()
    try:
        return time.time() - entry.stat().st_mtime > STALE
    except FileNotFoundError:
        return False
