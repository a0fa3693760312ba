"""The files of a data set in shards, in a local folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from simpletune.system.options import UserError


class Files(Protocol):
    """The files below a place, by their names relative to it."""

    place: str
    """The place's name in messages."""

    def sizes(self, suffix: str) -> dict[str, int]:
        """The sizes in bytes of the files whose names end so, by name, sorted.

        Raises:
            UserError: they cannot be listed.
        """

    def version(self, name: str) -> str | None:
        """A value that changes with a file's content; None if unknown."""

    def open(self, name: str) -> BinaryIO:
        """Open a file to read and seek in.

        Raises:
            UserError: it cannot be opened.
        """

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read bytes from ``start`` up to ``end``, exclusively.

        Raises:
            UserError: they cannot be read, or there are fewer.
        """


class LocalFiles:
    """Local files.

    Args:
        place: a file, a folder, or a pattern such as ``pictures/*.parquet``.
    """

    def __init__(self, place: str):
        self.place = place
        path, magic = Path(place), [number for number, part in enumerate(Path(place).parts) if glob.has_magic(part)]
        if path.exists() or not magic:
            self.root, self._pattern = (path.parent, path.name) if path.is_file() else (path, "")
        else:
            self.root, self._pattern = Path(*path.parts[: magic[0]]), str(Path(*path.parts[magic[0] :]))

    def sizes(self, suffix: str) -> dict[str, int]:
        """The sizes in bytes of the files whose names end so, by name, sorted."""
        names = sorted(name for name in self._names() if name.endswith(suffix))
        return {name: (self.root / name).stat().st_size for name in names}

    def _names(self) -> Iterator[str]:
        """The names of all files, without following links to folders, and without hidden ones."""
        if self._pattern:
            found = glob.iglob(self._pattern, root_dir=self.root, recursive=True)
            yield from (PurePosixPath(name).as_posix() for name in found if (self.root / name).is_file())
            return
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if not name.startswith(".") and (Path(folder) / name).is_file():
                    yield (Path(folder) / name).relative_to(self.root).as_posix()

    def version(self, name: str) -> str | None:
        """None: unknown without reading the file."""
        return None

    def open(self, name: str) -> BinaryIO:
        """Open a file to read and seek in."""
        try:
            return open(self.root / name, "rb")
        except OSError as error:
            raise UserError(f"data.path: {self.root / name} cannot be read ({error.strerror or error})") from None

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read bytes from ``start`` up to ``end``, exclusively."""
        with self.open(name) as file:
            try:
                file.seek(start)
                data = file.read(end - start)
            except OSError as error:
                raise UserError(f"data.path: {self.root / name} cannot be read ({error.strerror or error})") from None
        return require_length(data, end - start, str(self.root / name))


def require_length(data: bytes, count: int, what: str) -> bytes:
    """Return the data if it has the required length.

    Raises:
        UserError: it is shorter or longer.
    """
    if len(data) != count:
        raise UserError(
            f"data.path: {what} gave {len(data):,} bytes instead of {count:,}: it is truncated, or has changed. Fetch "
            "or write it again"
        )
    return data
