"""The index of a cache's shards: where each sample is, in memory and as ``index.parquet``.

In memory a sample takes 40 bytes, without its key: a million samples take 40 MB. The file also has the keys. It saves
reading all shards' headers; only the headers of shards that it lacks are read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from simpletune.data.storage.cache import Layout
from simpletune.data.storage.shards import INDEX, SampleLocation, ShardStore, parse_header, sample_locations
from simpletune.system.console import say
from simpletune.system.options import UserError
from simpletune.system.stores.store import READS, ObjectChanged, StoreError, send_with_retries

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

HEADER = 2**18  # bytes read first from a shard; its header usually fits into them
TRIES = 8  # attempts to replace an index that other processes replace, too
UNLISTED = 16  # shards that the index may lack, besides an eighth of all, before it is rewritten
RECENT = 2**15  # rows kept in a dictionary before they are sorted in
BATCH = 2**16  # rows read or written together
COLUMNS = ("name", "shard", "start", "size", "crc32", "tensors")
COVERED = b"shards"  # key of the file's metadata
FIELDS = {"high": "u8", "low": "u8", "shard": "u4", "start": "u8", "size": "u4", "crc32": "u4", "layout": "u4"}
T = TypeVar("T", str, Layout)


class Numbered(Generic[T]):
    """Values numbered in the order in which they are added."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


class SampleIndex:
    """The samples of all shards by the names of their keys; of two samples with the same name, keeps the first."""

    def __init__(self) -> None:
        self._shards, self._layouts = Numbered[str](), Numbered[Layout]()
        self._lost: set[str] = set()
        self._sorted = {field: np.empty(0, kind) for field, kind in FIELDS.items()}
        self._recent: dict[tuple[int, int], tuple[int, ...]] = {}

    @classmethod
    def read(cls, content: bytes) -> SampleIndex:
        """Read an ``index.parquet``, without its keys. Raises UserError if it is damaged."""
        index, parts = cls(), {field: [column] for field, column in cls()._sorted.items()}
        with _open(content) as table:
            for batch in table.iter_batches(BATCH, columns=list(COLUMNS)):
                names = np.frombuffer(b"".join(batch.column("name").to_pylist()), ">u8").reshape(-1, 2)
                shards = _renumber(batch.column("shard"), index._shards.number)
                layouts = _renumber(batch.column("tensors"), lambda text: index._layouts.number(parse_layout(text)))
                found = {"high": names[:, 0], "low": names[:, 1], "shard": shards, "layout": layouts}
                found |= {field: batch.column(field).to_numpy() for field in ("start", "size", "crc32")}
                for field, kind in FIELDS.items():
                    parts[field].append(found[field].astype(kind))
        index._sort({field: np.concatenate(columns) for field, columns in parts.items()})
        index.note(named_shards(content))
        return index

    @property
    def shards(self) -> set[str]:
        """The shards whose samples are known."""
        return set(self._shards.values) - self._lost

    def note(self, shards: Iterable[str]) -> None:
        """Mark shards as known, even if none of their samples is in use."""
        for shard in shards:
            self._shards.number(shard)
            self._lost.discard(shard)

    def __len__(self) -> int:
        return len(self._sorted["high"]) + len(self._recent)

    @property
    def bytes(self) -> int:
        """The memory of all sorted samples, in bytes."""
        return sum(column.nbytes for column in self._sorted.values())

    def __contains__(self, name: str) -> bool:
        own = numbers_of(name)
        return own in self._recent or self._place(own, self._sorted) is not None

    def find(self, name: str) -> SampleLocation | None:
        """Return where a sample is, as a row without its key; None if it is in no shard."""
        own = numbers_of(name)
        row = self._recent.get(own)
        if row is None:
            columns = self._sorted  # another thread may replace it
            place = self._place(own, columns)
            if place is None:
                return None
            row = tuple(int(column[place]) for column in columns.values())[2:]  # without the halves of the name
        shard, start, size, crc32, layout = row
        return SampleLocation(name, self._shards.values[shard], start, size, crc32, self._layouts.values[layout])

    @staticmethod
    def _place(own: tuple[int, int], columns: dict[str, np.ndarray]) -> int | None:
        highs, lows = columns["high"], columns["low"]
        place = int(np.searchsorted(highs, np.uint64(own[0])))
        while place < len(highs) and int(highs[place]) == own[0]:
            if int(lows[place]) == own[1]:
                return place
            place += 1
        return None

    def add(self, rows: Iterable[SampleLocation]) -> None:
        for row in rows:
            if row.name not in self:
                shard, layout = self._shards.number(row.shard), self._layouts.number(row.layout)
                self._recent[numbers_of(row.name)] = (shard, row.start, row.size, row.crc32, layout)
            if len(self._recent) >= RECENT:
                self._sort_in()

    def _sort_in(self) -> None:
        new = np.array([(*own, *rest) for own, rest in self._recent.items()], dtype=object).reshape(-1, len(FIELDS)).T
        pairs = zip(self._sorted.items(), new, strict=True)
        self._sort({field: np.concatenate([column, own.astype(column.dtype)]) for (field, column), own in pairs})
        self._recent.clear()

    def _sort(self, columns: dict[str, np.ndarray]) -> None:
        order = np.lexsort((columns["low"], columns["high"]))
        self._sorted = {field: column[order] for field, column in columns.items()}

    def remove(self, shards: Iterable[str], samples: Iterable[tuple[str, str]] = ()) -> None:
        """Forget all samples of some shards, and single samples, given as pairs of a name and its shard."""
        gone, samples = set(shards), list(samples)
        if not gone and not samples:
            return
        self._lost |= gone
        self._sort_in()
        numbers = [number for number, shard in enumerate(self._shards.values) if shard in gone]
        keep = ~np.isin(self._sorted["shard"], numbers)
        for name, shard in samples:
            place = self._place(numbers_of(name), self._sorted)
            if place is not None and self._shards.values[int(self._sorted["shard"][place])] == shard:
                keep[place] = False
        if not keep.all():
            self._sorted = {field: column[keep] for field, column in self._sorted.items()}


def read_rows(content: bytes) -> Iterator[SampleLocation]:
    """Read the rows of an ``index.parquet`` with their keys, a part at a time."""
    with _open(content) as table:
        for batch in table.iter_batches(BATCH, columns=["key", *COLUMNS]):
            for row in batch.to_pylist():
                name, layout = row.pop("name").hex(), parse_layout(row.pop("tensors"))
                yield SampleLocation(**row, name=name, layout=layout)


def named_shards(content: bytes) -> list[str]:
    """List the shards that an ``index.parquet`` covers."""
    with _open(content) as table:
        return [str(shard) for shard in json.loads((table.metadata.metadata or {})[COVERED])]


@contextmanager
def _open(content: bytes) -> Iterator[ParquetFile]:
    """Open an ``index.parquet``. Raises UserError if it turns out damaged within this context."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(pa.BufferReader(content), read_dictionary=["shard", "tensors"]) as table:
            yield table
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{INDEX} is damaged ({reason}). Remove it: it is rebuilt from the shards") from None


def write_rows(rows: Iterable[SampleLocation], shards: Iterable[str]) -> bytes:
    """Make an ``index.parquet`` of rows with their keys, each name once; ``shards`` are all that it covers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = pa.dictionary(pa.int32(), pa.string())
    whole = [("start", pa.int64()), ("size", pa.int64()), ("crc32", pa.int64())]
    schema = pa.schema([("key", pa.string()), ("name", pa.binary(16)), ("shard", words), *whole, ("tensors", words)])
    content = io.BytesIO()
    with pq.ParquetWriter(content, schema, compression="zstd") as writer:
        left = iter(rows)
        while portion := list(islice(left, BATCH)):
            columns = {field: [getattr(row, field) for row in portion] for field in ("key", "shard", *dict(whole))}
            columns["name"] = [bytes.fromhex(row.name) for row in portion]
            columns["tensors"] = [json.dumps(row.layout) for row in portion]
            arrays = [pa.array(columns[field.name], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        writer.add_key_value_metadata({COVERED: json.dumps(sorted(shards))})
    return content.getvalue()


def _renumber(column: object, number: Callable[[str], int]) -> np.ndarray:
    """Map a dictionary column's words to numbers."""
    words: list[str] = column.dictionary.to_pylist()  # type: ignore[attr-defined]
    indices: np.ndarray = column.indices.to_numpy()  # type: ignore[attr-defined]
    return np.array([number(word) for word in words], "u4")[indices]


def parse_layout(text: str) -> Layout:
    """Parse a sample's tensors as written by ``write_rows``."""
    return tuple((str(name), str(kind), tuple(map(int, shape)), int(at)) for name, kind, shape, at in json.loads(text))


def numbers_of(name: str) -> tuple[int, int]:
    """Convert a name of 32 hexadecimal digits to two 64-bit numbers."""
    return int(name[:16], 16), int(name[16:], 16)


class ShardIndex:
    """The samples in all shards of a place."""

    def __init__(self, store: ShardStore):
        self.store = store
        self._samples: SampleIndex | None = None
        self._stamp, self._unlisted, self._outdated = -1, 0, False

    @property
    def samples(self) -> SampleIndex:
        """The samples; read at first use."""
        if self._samples is None:
            self.refresh()
        assert self._samples is not None
        return self._samples

    def is_stale(self) -> bool:
        """Return whether a process of this machine has stored shards since the last ``refresh``."""
        return self.store.stamp() != self._stamp

    def refresh(self) -> None:
        """List the shards, and read the headers of those that the index lacks.

        Raises:
            UserError: the index of a web server is missing or damaged.
            StoreError: the store does not answer.
        """
        stamp, names = self.store.stamp(), self.store.names()
        samples = self._samples if self._samples is not None else self._read(required=names is None)
        if names is not None:
            gone, damaged = samples.shards - set(names), self.store.list_damaged()
            samples.remove(gone, damaged)
            self._outdated = self._outdated or bool(gone)
            new = sorted(set(names) - samples.shards)
            for shard in new:
                samples.add(row for row in self._rows(shard, names[shard]) if (row.name, shard) not in damaged)
            samples.note(new)
            self._unlisted += len(new)
        self._samples, self._stamp = samples, stamp

    def _stored(self) -> tuple[bytes, str | None] | None:
        return send_with_retries(lambda: self.store.store.read(INDEX))

    def _read(self, required: bool) -> SampleIndex:
        """Read the stored index; return an empty one if it is missing or damaged and the shards can be listed."""
        for left in reversed(range(READS)):
            found = self._stored()
            if found is None and required:
                raise UserError(
                    f"output.cache: {self.store} has no {INDEX}, and a web server cannot list shards. Check the "
                    "URL, or run simpletune train CONFIG --prepare where the cache was filled"
                )
            try:
                return SampleIndex() if found is None else SampleIndex.read(found[0])
            except UserError as error:
                if left:  # the answer may have been cut short
                    continue
                if required:
                    raise
                say(f"cache   {error}. Reading the shards of {self.store}")
        self._outdated = True
        return SampleIndex()

    def _rows(self, shard: str, size: int) -> list[SampleLocation]:
        """Read the samples of a shard from its header; none, with a warning, if it is damaged."""
        try:
            parsed = parse_header(lambda end: bytes(self.store.read(shard, 0, min(end, size))), shard, HEADER)
            rows = sample_locations(shard, *parsed)
            if any(row.start + row.size > size for row in rows):
                raise UserError(f"the shard {shard} is damaged: it is truncated. Remove it")
        except UserError as error:
            say(f"warning {self.store}: {error}. Its samples count as missing")
            return []
        return rows

    def add(self, rows: Iterable[SampleLocation]) -> None:
        """Add the samples of a shard that this process has stored."""
        self.samples.add(rows)
        self._unlisted += 1

    def forget(self, name: str, shard: str) -> None:
        self.samples.remove((), [(name, shard)])
        self._outdated = True

    def publish(self, everything: bool) -> None:
        """Write the index if it lacks many shards; ``everything``: if it lacks any."""
        few = 0 if everything else UNLISTED + len(self.samples.shards) // 8
        if self._unlisted <= few and not (everything and self._outdated):
            return
        try:
            self._write()
        except StoreError as error:  # with read-only rights, for example
            say(f"warning {error}: {INDEX} stays as it is, and every start reads the headers of the other shards")
        self._unlisted, self._outdated = 0, False

    def _write(self) -> None:
        for _ in range(TRIES):
            self.refresh()
            found = self._stored()
            content = write_rows(self._all_rows(found and found[0]), self.samples.shards)
            try:
                self.store.store.replace(INDEX, content, found and found[1])
                return
            except ObjectChanged:
                continue
        raise StoreError(f"{self.store}: the index keeps changing")

    def _all_rows(self, stored: bytes | None) -> Iterator[SampleLocation]:
        """Yield the rows of the stored index that still count, then the rows of the shards that it lacks."""
        named = set[str]()
        if stored is not None:
            try:
                SampleIndex.read(stored)
            except UserError:
                pass  # the first reading has reported the damage
            else:
                named = set(named_shards(stored))
                yield from filter(self._counts, read_rows(stored))
        names = self.store.names() or {}
        for shard in sorted(self.samples.shards & set(names) - named):
            yield from filter(self._counts, self._rows(shard, names[shard]))

    def _counts(self, row: SampleLocation) -> bool:
        known = self.samples.find(row.name)
        return known is not None and (known.shard, known.start) == (row.shard, row.start)
