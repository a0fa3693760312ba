"""Read and write the files of a folder as those of any other store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from simpletune.system.atomic import atomic_file
from simpletune.system.stores.store import CHANGED, ObjectChanged, Store, StoreError, require_length


class FolderStore(Store):
    """A folder of this machine, or of one that is mounted.

    It need not exist. Hidden files do not count. Links to files are followed, links to folders are not.
    """

    remote = False

    def __init__(self, folder: Path):
        self.folder, self.url = folder, str(folder)

    def versions(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """List the files under a prefix. Their versions are unknown, since nothing but reading them tells."""
        found: dict[str, tuple[int, str]] = {}
        waiting = [prefix.rstrip("/")]
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(self.folder / folder) as entries:
                    for entry in entries:
                        key = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.name.startswith("."):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(key)
                        elif entry.is_file():
                            found[key] = entry.stat().st_size, ""
            except FileNotFoundError:  # nothing was stored yet, or another process has removed it
                continue
            except OSError as error:
                raise self._error(folder, error) from None
        return found

    def read_range(self, key: str, start: int, end: int) -> bytearray:
        content = bytearray(end - start)
        try:
            with open(self.folder / key, "rb", buffering=0) as handle:
                handle.seek(start)
                got = handle.readinto(content) or 0
                while 0 < got < len(content):  # one call reads 2 GiB at most
                    more = handle.readinto(memoryview(content)[got:])
                    if not more:
                        break
                    got += more
        except OSError as error:
            raise self._error(key, error) from None
        return content if got == len(content) else require_length(content[:got], end - start, f"{self.folder / key}")

    def open(self, key: str) -> BinaryIO:
        """Open a file to read and seek in."""
        try:
            return open(self.folder / key, "rb")
        except OSError as error:
            raise self._error(key, error) from None

    def read(self, key: str) -> tuple[bytes, str | None] | None:
        """Read a small file. When it was written, and its size, identify it."""
        try:
            with open(self.folder / key, "rb") as handle:
                return handle.read(), _identity(os.fstat(handle.fileno()))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(key, error) from None

    def replace(self, key: str, content: bytes, known: str | None) -> str | None:
        """Store a small file. Of two processes that do so at the same moment, both may succeed."""
        file = self.folder / key
        if (_identity(file.stat()) if file.exists() else None) != known:
            raise ObjectChanged(CHANGED)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file, len(content), shared=True) as part:
            part.write_bytes(content)
            identity = _identity(part.stat())
        return identity

    def upload(self, file: Path, key: str) -> None:
        target = self.folder / key
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)
        except OSError as error:
            raise self._error(key, error) from None

    def _error(self, key: str, error: OSError) -> StoreError:
        return StoreError(f"{self.folder / key} cannot be read or written ({error.strerror or error})")


def _identity(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}"
