"""A data set's files in an object store or on the Hugging Face hub, read in ranges, or copied here up to a limit."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from simpletune.data.streaming.files import Files, require_length
from simpletune.system.atomic import atomic_file
from simpletune.system.options import UserError
from simpletune.system.printable import describe_exception
from simpletune.system.redact import redact
from simpletune.system.stores.store import Store, StoreError

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

PIECE = 2**24  # bytes of one request
HUB = "hf://"


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into folder and name pattern: ``s3://b/x/*.parquet`` into ``s3://b/x`` and ``*.parquet``."""
    head, slashes, rest = url.rstrip("/").partition("://")
    parts = rest.split("/")
    first = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    if first == len(parts) and parts[-1].endswith(".parquet"):
        first -= 1
    return f"{head}{slashes}{'/'.join(parts[:first])}", "/".join(parts[first:])


class StoreFiles:
    """Files below a URL of an object store.

    Args:
        url: the URL of a folder, a file, or a pattern.

    Raises:
        UserError: obstore is not installed, the URL or its settings are invalid, or it cannot be listed.
    """

    def __init__(self, url: str):
        self.place = url
        folder, pattern = split_url(url)
        self._store = Store(folder, "data.path")
        with reaching(url):
            self._known = matching(self._store.versions(), pattern)

    def sizes(self, suffix: str) -> dict[str, int]:
        """The sizes in bytes of the files whose names end so, by name, sorted."""
        return {name: size for name, (size, _) in self._known.items() if name.endswith(suffix)}

    def version(self, name: str) -> str | None:
        """The ETag of a file."""
        return self._known[name][1]

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read bytes from ``start`` to before ``end``; retries failures."""
        with reaching(name):
            pieces = range(start, end, PIECE)
            return b"".join(self._store.read_range(name, at, min(end, at + PIECE)) for at in pieces)

    def open(self, name: str) -> BinaryIO:
        """Open a file to read and seek in, each part by a request of its own."""
        return cast(BinaryIO, RangeFile(self, name, self._known[name][0]))


class HubFiles:
    """Files of a data set's repository on the hub.

    Args:
        url: ``hf://datasets/OWNER/NAME``, optionally followed by a folder, a file or a pattern.

    Raises:
        UserError: it cannot be listed.
    """

    def __init__(self, url: str):
        from huggingface_hub import HfFileSystem

        self.place = url
        folder, pattern = split_url(url)
        self._root = folder.removeprefix(HUB)
        self._hub: HfFileSystem = HfFileSystem()
        with reaching(url):
            found = self._hub.find(self._root, detail=True)
            listed = {
                name.removeprefix(f"{self._root}/"): (int(about["size"]), str(about.get("blob_id") or ""))
                for name, about in cast(dict[str, dict[str, str]], found).items()
            }
        self._known = matching(listed, pattern)

    def sizes(self, suffix: str) -> dict[str, int]:
        """The sizes in bytes of the files whose names end so, by name, sorted."""
        return {name: size for name, (size, _) in self._known.items() if name.endswith(suffix)}

    def version(self, name: str) -> str | None:
        """The hash under which the repository stores a file."""
        return self._known[name][1] or None

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read bytes from ``start`` up to ``end``, exclusively."""
        with reaching(name):
            data: bytes = self._hub.cat_file(f"{self._root}/{name}", start=start, end=end)
        return require_length(data, end - start, f"{self.place}: {name}")

    def open(self, name: str) -> BinaryIO:
        """Open a file to read and seek in, each part by a request of its own."""
        return cast(BinaryIO, RangeFile(self, name, self._known[name][0]))


def matching(known: Mapping[str, tuple[int, str]], pattern: str) -> dict[str, tuple[int, str]]:
    """The files whose names match a pattern, sorted; all files for an empty pattern."""
    return {name: known[name] for name in sorted(known) if not pattern or fnmatch.fnmatchcase(name, pattern)}


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Name what could not be read if a store or the hub fails.

    Raises:
        UserError: instead of their errors.
    """
    try:
        yield
    except StoreError as error:
        raise UserError(f"data.path: {error}. Check the connection and start again", code=3) from None
    except (OSError, ValueError) as error:
        reason = redact(describe_exception(error))[:300]
        raise UserError(
            f"data.path: {what} cannot be read ({reason}). Check the name, the connection and the token", code=3
        ) from None


class RangeFile(io.RawIOBase):
    """A file that sends a request for each read, without buffering.

    Args:
        files: where the file is.
        name: the file's name.
        size: its size in bytes.
    """

    def __init__(self, files: Files, name: str, size: int):
        self._files, self._name, self._size, self._at = files, name, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """The position of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position."""
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes; returns fewer only at the end."""
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        data = self._files.read(self._name, self._at, end) if end > self._at else b""
        self._at += len(data)
        return data


class LocalFileCache:
    """Files with whole local copies in a folder of limited size; removes the least recently used copies first.

    Processes may share the folder.

    Args:
        files: where they come from.
        folder: the folder for the copies; None: a temporary one.
        most: the limit in bytes.
    """

    def __init__(self, files: StoreFiles | HubFiles, folder: Path | None, most: int):
        self._files, self._most, self._lock = files, most, threading.Lock()
        self._temporary = tempfile.TemporaryDirectory(prefix="simpletune-") if folder is None else None
        self._folder = Path(self._temporary.name) if folder is None and self._temporary else cast(Path, folder)
        self.place, self._sizes = files.place, files.sizes("")

    def sizes(self, suffix: str) -> dict[str, int]:
        """The sizes in bytes of the files whose names end so, by name, sorted."""
        return {name: size for name, size in self._sizes.items() if name.endswith(suffix)}

    def version(self, name: str) -> str | None:
        """A value that changes with a file's content."""
        return self._files.version(name)

    def open(self, name: str) -> BinaryIO:
        """Open a file's copy."""
        with self._lock:
            copy = self._copy(name)
            try:
                return open(copy, "rb")
            except FileNotFoundError:
                self._fetch(name, copy)
                return open(copy, "rb")

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read bytes from ``start`` to before ``end`` from a copy."""
        with self.open(name) as file:
            os.utime(file.fileno())
            file.seek(start)
            return require_length(file.read(end - start), end - start, name)

    def _copy(self, name: str) -> Path:
        about = f"{self.place}\n{name}\n{self._sizes[name]}\n{self.version(name)}"
        return self._folder / hashlib.sha256(about.encode()).hexdigest()[:32]

    def _fetch(self, name: str, copy: Path) -> None:
        """Copy a file atomically, and remove copies beyond the limit."""
        self._folder.mkdir(parents=True, exist_ok=True)
        size = self._sizes[name]
        with atomic_file(copy, needed=size) as part, open(part, "wb") as file:
            for start in range(0, size, PIECE):
                file.write(self._files.read(name, start, min(size, start + PIECE)))
        kept = []
        for entry in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process removes copies, too
                about = entry.stat()
                kept.append((about.st_mtime_ns, about.st_size, entry))
        room = self._most
        for _, size, entry in sorted(kept, reverse=True):
            room -= size
            if room < 0 and entry != copy:
                entry.unlink(missing_ok=True)
