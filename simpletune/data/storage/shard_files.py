"""The files of a data set in shards, wherever they are."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from simpletune.data.storage.copies import LocalCopies
from simpletune.system.options import UserError
from simpletune.system.stores.folder_store import FolderStore
from simpletune.system.stores.hub_store import HUB, HubStore
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import RangeFile, StoreError, StoreReader, require_length

PIECE = 2**24  # bytes of one request
PARQUET, TARS = (".parquet",), (".tar", ".tar.gz", ".tgz")
PROBES, PROBE = 16, 4096  # number of places that identify a file without a version, and bytes at each


class DataFiles:
    """The files below a place, by their names relative to it.

    Args:
        place: a file, a folder, or a pattern such as ``pictures/*.parquet``; or a URL of one of them.

    Raises:
        UserError: it does not exist, or cannot be opened or listed.
    """

    def __init__(self, place: str):
        self.place = place
        self._copies: LocalCopies | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if "://" in place:
            url, pattern = split_url(place)
            self._store: StoreReader = HubStore(url) if place.startswith(HUB) else ObjectStore(url, "data.path")
        else:
            folder, pattern = split_path(Path(place))
            if not folder.exists():
                raise UserError(
                    f"data.path: {place} does not exist. Give a parquet or tar file, a folder or a pattern "
                    f"({Path.cwd()}), a URL such as s3://bucket/pictures, or {HUB}datasets/OWNER/NAME"
                )
            self._store = FolderStore(folder)
        if isinstance(self._store, FolderStore) and pattern:  # where * does not match a slash, and may match a link
            folder = self._store.folder
            names = (name for name in glob.iglob(pattern, root_dir=folder, recursive=True) if (folder / name).is_file())
            known = {Path(name).as_posix(): ((folder / name).stat().st_size, "") for name in names}  # versions unknown
        else:
            with self._errors():
                known = self._store.versions()
            known = {name: of for name, of in known.items() if not pattern or fnmatch.fnmatchcase(name, pattern)}
        self._known = dict(sorted(known.items()))

    def sizes(self, suffix: str | tuple[str, ...] = "") -> dict[str, int]:
        """Return the sizes in bytes of the files whose names end so, by name, sorted."""
        return {name: size for name, (size, _) in self._known.items() if name.endswith(suffix)}

    def shards(self, suffixes: tuple[str, ...], split: str | None) -> dict[str, int]:
        """Return the sizes of the files whose names end so and contain ``split``. Raises UserError if there are
        none."""
        found = {name: size for name, size in self.sizes(suffixes).items() if split is None or split in name}
        if not found:
            of = "" if split is None else f" with {split!r} in its name"
            kinds = " or ".join(suffixes)
            raise UserError(f"data.path: {self.place} contains no {kinds} file{of}. Name a folder with one")
        return found

    def version(self, name: str) -> str | None:
        """Return a value that changes with a file's content; None if unknown."""
        return self._known[name][1] or None

    def identity(self, name: str) -> dict[str, str]:
        """Return what changes with the content of a file without hashes: its version, or the bytes at some places."""
        if version := self.version(name):
            return {"version": version}
        size = self._known[name][0]
        last = max(0, size - PROBE)
        places = sorted({place * last // (PROBES - 1) for place in range(PROBES)})
        probes = [self.read(name, start, min(size, start + PROBE)) for start in places]
        return {"probes": hashlib.sha256(b"".join(probes)).hexdigest()}

    def keep_copies(self, folder: Path | None, limit: int) -> None:
        """Read remote files whole from now on; keep ``limit`` bytes of copies; None: in a temporary folder."""
        if self._store.remote:
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="simpletune-")
                folder = Path(self._temporary.name)
            self._copies = LocalCopies(folder, limit)

    def open(self, name: str) -> BinaryIO:
        """Open a file to read and seek in."""
        size = self._known[name][0]
        with self._errors():
            if isinstance(self._store, FolderStore):
                return self._store.open(name)
            if self._copies is None:
                return cast(BinaryIO, RangeFile(partial(self.read, name), size))
            about = f"{self.place}\n{name}\n{size}\n{self.version(name)}"
            copy = hashlib.sha256(about.encode()).hexdigest()[:32]
            return self._copies.open(copy, size, lambda file: file.writelines(self._pieces(name, 0, size)))

    def read(self, name: str, start: int, end: int) -> bytes | bytearray:
        """Read bytes from ``start`` up to ``end``, exclusively. Raises UserError if they cannot be read, or there are
        fewer."""
        if self._copies is not None:
            with self.open(name) as file, self._errors():
                file.seek(start)
                return require_length(file.read(end - start), end - start, f"the copy of {name}")
        with self._errors():
            return (
                self._store.read_range(name, start, end)
                if end - start <= PIECE
                else b"".join(self._pieces(name, start, end))
            )

    def _pieces(self, name: str, start: int, end: int) -> Iterator[bytearray]:
        return (self._store.read_range(name, at, min(end, at + PIECE)) for at in range(start, end, PIECE))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the store's error into one that says what to do. Raises UserError instead of it."""
        try:
            yield
        except StoreError as error:
            if self._store.remote:
                remedy, code = "Check the name, the connection and the token, and start again", 3
            else:
                remedy, code = "It is truncated, or has changed: fetch or write it again", 2
            raise UserError(f"data.path: {error}. {remedy}", code=code) from None


def split_path(path: Path) -> tuple[Path, str]:
    """Split a path into a folder and a pattern of names in it; an empty pattern stands for all files."""
    magic = [number for number, part in enumerate(path.parts) if glob.has_magic(part)]
    if path.exists() or not magic:
        return (path.parent, glob.escape(path.name)) if path.is_file() else (path, "")
    return Path(*path.parts[: magic[0]]), str(Path(*path.parts[magic[0] :]))


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into folder and name pattern: ``s3://b/x/*.parquet`` into ``s3://b/x`` and ``*.parquet``."""
    head, slashes, rest = url.rstrip("/").partition("://")
    parts = rest.split("/")
    first = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    if first == len(parts) and parts[-1].endswith(PARQUET + TARS):
        first -= 1
    return f"{head}{slashes}{'/'.join(parts[:first])}", "/".join(parts[first:])
