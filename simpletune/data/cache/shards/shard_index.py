"""The samples that a shelf holds: its index, and the shards that the index does not list yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from simpletune.data.cache.shards.sample_index import INDEX, SampleIndex, named_shards, read_rows, write_rows
from simpletune.data.cache.shards.shard import SampleLocation, parse_header, sample_locations
from simpletune.data.cache.shards.shard_store import TRIES, ShardStore
from simpletune.system.atomic import remove, temporary_path
from simpletune.system.console import say
from simpletune.system.options import UserError
from simpletune.system.stores.store import READS, ObjectChanged, StoreError

HEADER = 2**18  # bytes read first from a shard; its header usually fits into them
UNNAMED = 16  # shards that the index may lack, besides an eighth of all, before it is rewritten


class ShardIndex:
    """The samples that a shelf holds.

    Args:
        shelf: where the shards are stored.
        folder: a folder of this machine for the index that is read or written.
    """

    def __init__(self, shelf: ShardStore, folder: Path):
        self.shelf, self.folder = shelf, folder
        self._index: SampleIndex | None = None
        self._stamp, self._unnamed, self._gone = -1, 0, False

    @property
    def index(self) -> SampleIndex:
        """The samples; read at first use."""
        if self._index is None:
            self.refresh()
        assert self._index is not None
        return self._index

    def is_stale(self) -> bool:
        """Whether a process of this machine has stored shards since the last ``refresh``."""
        return self.shelf.stamp() != self._stamp

    def refresh(self) -> None:
        """List the shards, and read the headers of those that the index lacks.

        Raises:
            UserError: the index of a web server is missing or damaged.
            StoreError: the store does not answer.
        """
        stamp = self.shelf.stamp()
        names = self.shelf.names()
        index = self._index if self._index is not None else self._read_index(required=names is None)
        if names is not None:
            gone, damaged = index.shards - set(names), self.shelf.damaged()
            index.remove(gone, damaged)
            self._gone = self._gone or bool(gone)
            new = sorted(set(names) - index.shards)
            for shard in new:
                index.add(row for row in self._rows(shard, names[shard]) if (row.name, shard) not in damaged)
            index.note(new)
            self._unnamed += len(new)
        self._index, self._stamp = index, stamp

    def _read_index(self, required: bool) -> SampleIndex:
        """Read the stored index; return an empty one if it is missing or damaged and the shards can be listed."""
        for left in reversed(range(READS)):
            with self._local_index() as (file, known):
                if known is None and required:
                    raise UserError(
                        f"output.cache: {self.shelf} has no {INDEX}, and a web server cannot list shards. Check the "
                        "URL, or run simpletune prepare where the cache was filled"
                    )
                try:
                    return SampleIndex() if known is None else SampleIndex.read(file)
                except UserError as error:
                    if left:  # the answer may have been cut short
                        continue
                    if required:
                        raise
                    say(f"cache   {error}. Reading the shards of {self.shelf}")
        self._gone = True  # write it again
        return SampleIndex()

    def _local_index(self) -> _Fetched:
        return _Fetched(self.shelf, self.folder)

    def _rows(self, shard: str, size: int) -> list[SampleLocation]:
        """Read the samples of a shard from its header; none, with a warning, if it is damaged."""
        try:
            end = min(HEADER, size)
            parsed = parse_header(bytes(self.shelf.read(shard, 0, end)), shard)
            if isinstance(parsed, int):
                parsed = parse_header(bytes(self.shelf.read(shard, 0, min(parsed, size))), shard)
            if isinstance(parsed, int):
                raise UserError(f"the shard {shard} is damaged: it ends within its header. Remove it")
            rows = sample_locations(shard, *parsed)
            if any(row.start + row.size > size for row in rows):
                raise UserError(f"the shard {shard} is damaged: it is truncated. Remove it")
        except UserError as error:
            say(f"warning {self.shelf}: {error}. Its samples count as missing")
            return []
        return rows

    def add(self, shard: str, rows: Iterable[SampleLocation]) -> None:
        """Add a shard that this process has stored."""
        self.index.add(rows)
        self._unnamed += 1

    def publish(self, everything: bool) -> None:
        """Write the index if it lacks many shards.

        Args:
            everything: write it if it lacks any.
        """
        few = 0 if everything else UNNAMED + len(self.index.shards) // 8
        if self._unnamed <= few and not (everything and self._gone):
            return
        try:
            self._write()
        except StoreError as error:  # with read-only rights, for example
            say(f"warning {error}: {INDEX} stays as it is, and every start reads the headers of the other shards")
        self._unnamed, self._gone = 0, False

    def _write(self) -> None:
        """Write the index.

        Raises:
            StoreError: the store does not accept it.
        """
        for left in reversed(range(TRIES)):
            self.refresh()
            with self._local_index() as (file, known):
                target = temporary_path(self.folder / f"new-{INDEX}", shared=True)
                write_rows(self._all_rows(file if known is not None else None), target, self.index.shards)
                try:
                    self.shelf.put_index(target, known)
                    return
                except ObjectChanged:
                    if not left:
                        raise StoreError(f"{self.shelf}: the index keeps changing") from None
                finally:
                    remove(target)

    def _all_rows(self, stored: Path | None) -> Iterator[SampleLocation]:
        """The rows of the stored index that still count, then the rows of the shards that it lacks."""
        index, named = self.index, set[str]()
        if stored is not None and _is_sound(stored):
            named = set(named_shards(stored))
            yield from (row for row in read_rows(stored) if _is_same(index.find(row.name), row))
        names = self.shelf.names() or {}
        for shard in sorted(index.shards & set(names) - named):
            for row in self._rows(shard, names[shard]):
                if _is_same(index.find(row.name), row):
                    yield row

    def forget(self, name: str, shard: str) -> None:
        """Forget a sample."""
        self.index.remove((), [(name, shard)])
        self._gone = True


def _is_same(known: SampleLocation | None, row: SampleLocation) -> bool:
    return known is not None and (known.shard, known.start) == (row.shard, row.start)


def _is_sound(file: Path) -> bool:
    """Whether an index can be read to its end; the first reading has reported any failure."""
    try:
        SampleIndex.read(file)
    except UserError:
        return False
    return True


class _Fetched:
    """A context with the stored index as a local file: the file and what identifies it, or None."""

    def __init__(self, shelf: ShardStore, folder: Path):
        self.shelf, self.file = shelf, temporary_path(folder / INDEX, shared=True)

    def __enter__(self) -> tuple[Path, str | None]:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return self.file, self.shelf.fetch_index(self.file)

    def __exit__(self, *_: object) -> None:
        self.file.unlink(missing_ok=True)
