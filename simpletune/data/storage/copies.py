"""Local copies of what was read from an object store or the hub, in a folder of bounded size."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from simpletune.system.atomic import atomic_file, is_abandoned
from simpletune.system.disk import describe_full_disk
from simpletune.system.locks import Ranges

SPARE = 8  # an eighth of the limit is freed at once, so that the folder is not searched for every sample


class LocalCopies:
    """Files in a folder; removes the least recently used ones when their bytes exceed a limit.

    Processes of one machine may share the folder, and stay within the limit together, not counting what they are
    fetching. Threads may share an object.
    """

    def __init__(self, folder: Path, limit: int, processes: int = 1):
        self.folder, self.limit = folder, limit
        self._room = limit // SPARE // max(processes, 1)
        self._written = self._room  # so that the first ``put`` counts what an earlier process has left
        self._lock = threading.Lock()

    def get(self, name: str) -> bytearray | None:
        """Read a file, and mark it as used; None if it is not there."""
        file = self.folder / name
        try:
            with open(file, "rb", buffering=0) as handle:
                content = bytearray(os.fstat(handle.fileno()).st_size)
                got = handle.readinto(content)
            os.utime(file)
        except FileNotFoundError:
            return None
        return content if got == len(content) else None

    def __contains__(self, name: str) -> bool:
        """Return whether a file is there; marks it as used."""
        try:
            os.utime(self.folder / name)
        except FileNotFoundError:
            return False
        return True

    def put(self, name: str, content: bytes | bytearray) -> bool:
        """Write a file; return whether it was kept. Does not keep one that takes too much of the limit."""
        if len(content) > self._room:
            return False
        with self._lock:
            self._written += len(content)
            full = self._written > self._room
        if full:
            self.trim(self.limit - self.limit // SPARE - len(content))
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            part.write_bytes(content)
            os.replace(part, file)
        except OSError as error:
            part.unlink(missing_ok=True)
            if describe_full_disk(error) is None:
                raise
            self.trim(self.limit // 2)  # the disk is full: what was read need not be kept
            return False
        return True

    def open(self, name: str, size: int, write: Callable[[BinaryIO], None]) -> BinaryIO:
        """Open a large file, however much of the limit it takes, and mark it as used; ``write`` it if it is missing."""
        file = self.folder / name
        with self._lock:
            while True:
                try:
                    handle = open(file, "rb")
                    os.utime(handle.fileno())
                    return handle
                except FileNotFoundError:
                    file.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(file, needed=size, shared=True) as part, open(part, "wb") as new:
                    write(new)
                self._remove_oldest(self.limit, keep=file)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def trim(self, most: int) -> None:
        """Remove the least recently used files until at most ``most`` bytes are left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with Ranges(self.folder / ".lock") as ranges, ranges.hold(0, 0) as alone:
            if not alone:  # another process is trimming
                return
            self._remove_oldest(most)
            with self._lock:
                self._written = 0

    def _remove_oldest(self, most: int, keep: Path | None = None) -> None:
        found = list[tuple[int, int, Path]]()
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # another process has removed it
                status = path.stat()
                arriving = path.suffix == ".part" and not is_abandoned(path)
                if stat.S_ISREG(status.st_mode) and path.name != ".lock" and not arriving:
                    found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= most:
                break
            with suppress(FileNotFoundError):
                if path != keep:
                    path.unlink()
                    total -= size
