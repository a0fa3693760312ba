"""Where a cache's shards are stored: a folder, or a prefix of an object store.

index.parquet                where each sample is; rebuilt from the shards if missing or damaged shards/NAME.safetensors
a shard damaged/SAMPLE.SHARD         an empty file: this shard's sample is damaged and no longer used
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from simpletune.data.cache.shards.sample_index import INDEX
from simpletune.data.cache.shards.shard import SUFFIX
from simpletune.system.atomic import atomic_file, write_text
from simpletune.system.options import UserError
from simpletune.system.stores.store import ObjectChanged, Store, StoreError, send_with_retries

SHARDS, DAMAGED = "shards", "damaged"
TRIES = 8  # attempts to replace an index that other processes replace, too


class ShardStore(Protocol):
    """A place for shards."""

    remote: bool
    """Whether reading takes a network request."""
    read_only: bool
    """Whether nothing can be stored, so that encoded samples stay on this machine."""

    def names(self) -> dict[str, int] | None:
        """The sizes of all shards by name; None if they cannot be listed."""

    def damaged(self) -> set[tuple[str, str]]:
        """The samples that are no longer used, as pairs of a sample's name and its shard."""

    def read(self, shard: str, start: int, end: int) -> bytearray:
        """Read bytes of a shard.

        Raises:
            StoreError: it is missing, shorter, or cannot be read.
        """

    def put(self, shard: str, file: Path) -> None:
        """Store a shard atomically; moves or removes the file."""

    def set_aside(self, name: str, shard: str) -> str:
        """Mark a sample as damaged, and return where this is recorded."""

    def fetch_index(self, file: Path) -> str | None:
        """Write the index to a file, if there is one; return what identifies it."""

    def put_index(self, file: Path, known: str | None) -> None:
        """Replace the index by a file.

        Args:
            file: the new index.
            known: what identified the index that it was made from; None: there was none.

        Raises:
            Changed: another process has replaced the index meanwhile.
        """

    def stamp(self) -> int:
        """A number that changes when another process of this machine has stored a shard."""


class FolderShardStore:
    """Shards in a folder."""

    remote, read_only = False, False

    def __init__(self, folder: Path):
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def names(self) -> dict[str, int] | None:
        """The sizes of all shards by name."""
        return {entry[: -len(SUFFIX)]: size for entry, size in _files(self.folder / SHARDS) if entry.endswith(SUFFIX)}

    def damaged(self) -> set[tuple[str, str]]:
        """The samples that are no longer used."""
        return {_pair(entry) for entry, _ in _files(self.folder / DAMAGED)}

    def read(self, shard: str, start: int, end: int) -> bytearray:
        """Read bytes of a shard."""
        content, file = bytearray(end - start), self.folder / SHARDS / f"{shard}{SUFFIX}"
        try:
            with open(file, "rb", buffering=0) as handle:
                handle.seek(start)
                got = handle.readinto(content)
        except OSError as error:
            raise StoreError(f"{file} cannot be read ({error.strerror})") from None
        if got != len(content):
            raise StoreError(f"{file} ends after {start + (got or 0):,} bytes")
        return content

    def put(self, shard: str, file: Path) -> None:
        """Move a shard to its place."""
        (self.folder / SHARDS).mkdir(parents=True, exist_ok=True)
        os.replace(file, self.folder / SHARDS / f"{shard}{SUFFIX}")

    def set_aside(self, name: str, shard: str) -> str:
        """Mark a sample as damaged."""
        note = self.folder / DAMAGED / f"{name}.{shard}"
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, "", shared=True)
        return str(note)

    def fetch_index(self, file: Path) -> str | None:
        """Write the index to a file."""
        try:
            content = (self.folder / INDEX).read_bytes()
        except FileNotFoundError:
            return None
        with atomic_file(file, len(content), shared=True) as part:
            part.write_bytes(content)
        return "there"

    def put_index(self, file: Path, known: str | None) -> None:
        """Replace the index; if concurrent writers lose rows, these are read from the shards again."""
        os.replace(file, self.folder / INDEX)

    def stamp(self) -> int:
        """When a shard was last stored."""
        return _changed(self.folder / SHARDS)


class RemoteShardStore:
    """Shards in an object store, or on a web server (read-only).

    Args:
        store: the folder in the store.
        journal: a local file whose modification time records when a process of this machine last stored a shard.
    """

    remote = True

    def __init__(self, store: Store, journal: Path):
        self.store, self.journal = store, journal
        self.read_only = store.url.startswith(("http://", "https://"))

    def __str__(self) -> str:
        return self.store.url

    def names(self) -> dict[str, int] | None:
        """The sizes of all shards by name; a web server cannot list them."""
        if self.read_only:
            return None
        found = self._keys(SHARDS).items()
        return {Path(key).name[: -len(SUFFIX)]: size for key, size in found if key.endswith(SUFFIX)}

    def _keys(self, folder: str) -> dict[str, int]:
        return send_with_retries(lambda: self.store.keys(f"{folder}/"))

    def damaged(self) -> set[tuple[str, str]]:
        """The samples that are no longer used."""
        return set() if self.read_only else {_pair(Path(key).name) for key in self._keys(DAMAGED)}

    def read(self, shard: str, start: int, end: int) -> bytearray:
        """Read bytes of a shard."""
        return bytearray(self.store.read_range(f"{SHARDS}/{shard}{SUFFIX}", start, end))

    def put(self, shard: str, file: Path) -> None:
        """Upload a shard and remove its file."""
        send_with_retries(lambda: self.store.upload(file, f"{SHARDS}/{shard}{SUFFIX}"))
        file.unlink(missing_ok=True)
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.journal, f"{shard}\n", shared=True)

    def set_aside(self, name: str, shard: str) -> str:
        """Mark a sample as damaged.

        Raises:
            UserError: this is a web server.
        """
        if self.read_only:
            raise UserError(
                f"output.cache: the sample {name} of shard {shard} in {self.store.url} is damaged, and this "
                "can only be read. Encode it again where the cache is filled, or set output.cache to a folder"
            )
        key = f"{DAMAGED}/{name}.{shard}"
        try:
            send_with_retries(lambda: self.store.replace(key, b"", None))
        except ObjectChanged:
            pass  # another process has found it too
        return f"{self.store.url}/{key}"

    def fetch_index(self, file: Path) -> str | None:
        """Write the index to a file."""
        found = send_with_retries(lambda: self.store.read(INDEX))
        if found is None:
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file, len(found[0]), shared=True) as part:
            part.write_bytes(found[0])
        return found[1] or ""

    def put_index(self, file: Path, known: str | None) -> None:
        """Replace the index, only if it is still the known one."""
        self.store.replace(INDEX, file.read_bytes(), known)
        file.unlink(missing_ok=True)

    def stamp(self) -> int:
        """When a process of this machine last stored a shard."""
        return _changed(self.journal)


def _files(folder: Path) -> list[tuple[str, int]]:
    """The names and sizes of a folder's files, without hidden ones; the folder need not exist."""
    try:
        with os.scandir(folder) as entries:
            return [(each.name, each.stat().st_size) for each in entries if not each.name.startswith(".")]
    except FileNotFoundError:
        return []


def _pair(name: str) -> tuple[str, str]:
    sample, _, shard = name.partition(".")
    return sample, shard


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
