"""Names for what is being written: another name until it is whole, telling whose work it is."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from pathlib import Path

STALE = 3600  # seconds after which unfinished work of another machine is nobody's
NAME = re.compile(r"^\..*\.([0-9a-f]{6})-(\d+)\.part$")


def machine() -> str:
    """A short name for this machine or container: process numbers mean something on one only."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def own_place(target: Path) -> Path:
    """Where this process writes what will be renamed to ``target``; other processes may write the same."""
    return target.with_name(f".{target.name}.{machine()}-{os.getpid()}.part")


def write_whole(file: Path, text: str) -> None:
    """Write a text aside and rename it: the file is whole, or it is as it was."""
    aside = file.with_name(f".{file.name}.part")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, file)


def remove_left_over(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder; what a living one writes stays."""
    for entry in folder.glob(".*.part") if folder.is_dir() else ():
        if _is_nobodys(entry):
            remove(entry)


def remove(entry: Path) -> None:
    """Remove a file or a folder; one that is gone already is no error."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _is_nobodys(entry: Path) -> bool:
    match = NAME.match(entry.name)
    if match and match[1] == machine():
        return int(match[2]) != os.getpid() and not Path(f"/proc/{match[2]}").exists() and Path("/proc/self").exists()
    try:
        return time.time() - entry.stat().st_mtime > STALE
    except FileNotFoundError:
        return False
