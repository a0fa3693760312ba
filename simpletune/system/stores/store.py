"""What reads and writes the files of a place, wherever it is: a folder, an object store, the hub.

A file has a key: its path relative to the place, with ``/``. Threads may share a place.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

CHANGED = "the object has changed since it was read"
READS = 3  # attempts, besides a client's own
T = TypeVar("T")
Content = TypeVar("Content", bytes, bytearray)


class StoreError(OSError):
    """The error of a place that could not be read or written."""


class ObjectChanged(StoreError):
    """The error of a file to be replaced that has changed."""


class StoreReader(ABC):
    """The files of a place, to read."""

    url: str
    """The place's URL or path."""
    remote = True
    """Whether reading takes a network request."""

    def __str__(self) -> str:
        return self.url

    @abstractmethod
    def versions(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """List the files under a prefix that ends in ``/``: their sizes in bytes, and a text that changes with their
        content (empty if unknown), by key. Raises StoreError if they cannot be listed."""

    @abstractmethod
    def read_range(self, key: str, start: int, end: int) -> bytearray:
        """Read a file's bytes from ``start`` to before ``end``. Raises StoreError if there is no such file, it is
        shorter, or it could not be read in any of ``READS`` attempts."""


class Store(StoreReader):
    """The files of a place, to read and write."""

    read_only = False
    """Whether nothing can be stored, nor listed: a web server."""

    def keys(self, prefix: str = "") -> dict[str, int]:
        """List the files under a prefix as ``versions`` does, with their sizes only."""
        return {key: size for key, (size, _) in self.versions(prefix).items()}

    @abstractmethod
    def read(self, key: str) -> tuple[bytes, str | None] | None:
        """Read a small file.

        Returns:
            Its content and what identifies it (an ETag); None if there is no such file.
        """

    @abstractmethod
    def replace(self, key: str, content: bytes, known: str | None) -> str | None:
        """Store a small file if the stored one has not changed.

        Args:
            key: the file's key.
            content: its new content.
            known: what identified the stored file; None: there is none yet.

        Returns:
            What identifies the new one.

        Raises:
            ObjectChanged: the stored file has changed, or already exists.
        """

    @abstractmethod
    def upload(self, file: Path, key: str) -> None:
        """Store a file atomically. A folder of the same file system moves it; otherwise it stays. Raises StoreError if
        it could not be stored, or has another size there."""


class RangeFile(io.RawIOBase):
    """A file that sends a request for each read, without buffering; ``read_range`` reads its bytes from a start to
    before an end."""

    def __init__(self, read_range: Callable[[int, int], bytes | bytearray], size: int):
        self._read_range = read_range
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position."""
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes; return fewer only at the end."""
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        data = bytes(self._read_range(self._at, end)) if end > self._at else b""
        self._at += len(data)
        return data


def send_with_retries(call: Callable[[], T]) -> T:
    """Send a request to a store until it answers, up to ``READS`` times. Raises ObjectChanged at once."""
    for _ in range(READS - 1):
        try:
            return call()
        except ObjectChanged:
            raise
        except StoreError:
            continue
    return call()


def require_length(content: Content, wanted: int, what: str) -> Content:
    """Return a content of the wanted length. Raises StoreError if it has another."""
    if len(content) != wanted:
        raise StoreError(f"{what} gave {len(content):,} bytes instead of {wanted:,}")
    return content
