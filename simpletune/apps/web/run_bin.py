"""The bin: a deleted run lies in ``runs/.bin/TIME/NAME``, which no list of runs shows, until a person empties it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path

from simpletune.apps.web import queue
from simpletune.apps.web.queue import QueueEntry
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import file_stamp
from simpletune.system.atomic import remove
from simpletune.system.disk import format_bytes
from simpletune.system.locks import exclusive
from simpletune.system.options import UserError

BIN = ".bin"


@dataclass(frozen=True)
class BinnedRun:
    """A deleted run."""

    id: str  # the folder around it, named by the time; names it in the page's forms
    folder: Path
    size: int  # bytes

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def shown_size(self) -> str:
        return format_bytes(self.size)

    @property
    def when(self) -> str:
        """When it was deleted: 2026-11-30 18:05."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.folder.parent.stat().st_mtime))


def read_bin(roots: Roots) -> list[BinnedRun]:
    """List the deleted runs, the last one first."""
    try:
        places = sorted((roots.runs / BIN).iterdir(), reverse=True)
        folders = [folder for place in places if place.is_dir() for folder in place.iterdir()]
    except OSError:  # no bin, or one that is just being emptied
        return []
    return [BinnedRun(each.parent.name, each, _binned_bytes(each, file_stamp(each))) for each in folders]


@lru_cache(maxsize=1000)
def _binned_bytes(folder: Path, stamp: Hashable) -> int:
    return folder_bytes(folder)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # it has just been removed
                continue
    return found


def delete(roots: Roots, folder: Path) -> BinnedRun:
    """Move a run to the bin. Raises UserError if it trains, or waits in the queue."""
    name = folder.name
    (roots.runs / BIN).mkdir(exist_ok=True)
    place = free_name(roots.runs / BIN / time.strftime("%Y%m%d-%H%M%S"))

    def move(entries: list[QueueEntry]) -> list[QueueEntry]:
        if any(each.name == name and each.state in ("waiting", "running") for each in entries):
            raise UserError(f"{name} is in the queue. Remove it there, or stop it")
        with exclusive(folder, "and delete it then"):
            place.mkdir()
            os.rename(folder, place / name)
        return entries

    queue.change(roots, move)  # within its lock: a run that is queued meanwhile must not lose its folder
    return BinnedRun(place.name, place / name, 0)


def restore(roots: Roots, which: str) -> str:
    """Move a run back from the bin, to NAME.1, NAME.2, ... if there is another one of its name; return its name."""
    found = next((each for each in read_bin(roots) if each.id == which), None)
    if found is None:
        raise UserError("This run is no longer in the bin")
    target = free_name(roots.runs / found.name)
    with exclusive(target, "and restore it then"):  # a run of this name may just be starting
        if os.path.lexists(target):
            raise UserError(f"{target.name} has just been created. Restore {found.name} again")
        os.rename(found.folder, target)
    found.folder.parent.rmdir()
    return target.name


def empty(roots: Roots, which: Collection[str]) -> None:
    """Remove those runs of the bin for good, and no others, which another page may have put there since."""
    for each in read_bin(roots):
        if each.id in which:
            remove(each.folder.parent)


def free_name(folder: Path) -> Path:
    """Return the folder, or NAME.1, NAME.2, ...: the first that does not exist."""
    if not os.path.lexists(folder):
        return folder
    return next(new for n in count(1) if not os.path.lexists(new := folder.with_name(f"{folder.name}.{n}")))
