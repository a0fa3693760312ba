"""Rows of MDS data sets, the format of mosaicml-streaming: index.json and shards, plain or compressed, with hashes.

A shard consists of uint32 n, uint32 offsets[n + 1], the columns as JSON, then n samples. A sample has a uint32 length
for each column of variable size, then the columns' values, in the index's order. All numbers are little-endian.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from simpletune.data.storage.rows import Block, Columns, LruCache, Shard, ShardedRows, require_columns
from simpletune.data.storage.shard_files import DataFiles
from simpletune.system.options import Json, UserError, plural
from simpletune.system.portable import name_inside
from simpletune.system.printable import describe_exception

INDEX = "index.json"
MOST_INDEX = 2**28  # bytes
MOST_RATIO = 1000  # of a shard's bytes to those of its compressed form; pictures hardly shrink
PIECE = 2**22  # bytes to hash at once
ALGORITHMS = frozenset(hashlib.algorithms_guaranteed) - {"shake_128", "shake_256"}
CODECS = {"zstd": "zstd", "snappy": "snappy", "br": "brotli"}  # pyarrow's names
OTHERS = ("gz", "bz2")  # Python's own
IMAGES = ("bytes", "jpeg", "png")
CAPTIONS = ("str", "json")
SIZES = {name: np.dtype(name) for kind in ("int", "uint") for name in (f"{kind}{bits}" for bits in (8, 16, 32, 64))}
SIZES["int"] = np.dtype("int64")


@dataclass(frozen=True)
class MDSFile:
    """A file that the index lists."""

    name: str  # its path relative to the index
    bytes: int
    hashes: dict[str, str]  # by algorithm, in hexadecimal digits


@dataclass(frozen=True)
class MDSShard:
    """A shard in the index."""

    raw: MDSFile  # its content
    file: MDSFile  # what is stored: the content itself, or its compressed form
    compression: str  # such as ``zstd:3``; empty: the content is stored as it is
    samples: int
    columns: tuple[tuple[str, str, int | None], ...]  # (name, encoding, fixed size or None) in their order


class MDSRows(ShardedRows):
    """The rows of an MDS data set, in the order of its index.

    Args:
        files: where they are.
        columns: the columns to read.
        split: the folder that holds index.json; None: the data set's own.

    Raises:
        UserError: the index is missing or damaged, a shard has the wrong length, or a column is missing or has an
            unsupported kind.
    """

    def __init__(self, files: DataFiles, columns: Columns, split: str | None = None):
        self._files, self._folder = files, "" if split is None else f"{split}/"
        self._lock = threading.Lock()
        self._raw: LruCache[bytes] = LruCache()
        self._offsets: dict[int, np.ndarray] = {}
        listed = files.sizes("")
        index = f"{self._folder}{INDEX}"
        if index not in listed:
            raise UserError(f"data.path: {files.place} has no {index}. Name the folder of an MDS data set")
        self._entries = read_index(files.read(index, 0, min(listed[index], MOST_INDEX)), f"{files.place}/{index}")
        for entry in self._entries:
            self._require(entry, listed, columns)
        shards = [Shard(entry.file.name, entry.samples, self._digest(entry, columns)) for entry in self._entries]
        blocks = [Block(place, 0, entry.samples, entry.raw.bytes) for place, entry in enumerate(self._entries)]
        super().__init__(files.place, shards, blocks, columns)

    def notes(self) -> list[str]:
        """Return notes for the user: hashes that are not verified."""
        hashes = {name for entry in self._entries for name in entry.file.hashes}
        bare = sum(not verifiable_hashes(entry.file.hashes) for entry in self._entries)
        if not bare:
            return []
        why = f"unsupported kinds: {', '.join(sorted(hashes))}" if hashes else "the index has none"
        return [f"{plural(bare, 'shard')} of {self.place} without hashes to verify ({why}): only lengths are checked"]

    def _require(self, entry: MDSShard, listed: dict[str, int], columns: Columns) -> None:
        """Check that a shard exists in full length, with columns of supported kinds."""
        name = self._folder + entry.file.name
        if name not in listed:
            raise UserError(f"data.path: {name} is missing, which {INDEX} lists. Fetch it, or write the data set again")
        if listed[name] != entry.file.bytes:
            raise UserError(
                f"data.path: {name} has {listed[name]:,} bytes, and {INDEX} says {entry.file.bytes:,}. Fetch it again"
            )
        kinds = {column: kind for column, kind, _ in entry.columns}
        require_columns(columns, list(kinds), name)
        for field, column in columns.by_field().items():
            known = {"image_column": IMAGES, "caption_column": CAPTIONS}.get(field, tuple(SIZES))
            if kinds[column] not in known:
                raise UserError(
                    f"data.{field}: the column {column!r} of {name} is of the kind {kinds[column]!r}, which is not "
                    f"read. Write it as {' or '.join(known[:3])}"
                )

    def _digest(self, entry: MDSShard, columns: Columns) -> str:
        """Identify a shard's content by its hashes, or, if it has none, by its length and the bytes at some places."""
        file, hashes = entry.file, {**entry.raw.hashes, **{f"zip {n}": h for n, h in entry.file.hashes.items()}}
        about: Json = {"hashes": hashes, "bytes": file.bytes, "samples": entry.samples, "column": columns.image}
        if not hashes:
            about |= self._files.identity(self._folder + file.name)
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def _sample(self, block: int, row: int) -> dict[str, bytes]:
        """Read the columns of a sample."""
        shard = int(self._shard_of[block])
        entry, offsets = self._entries[shard], self._offsets_of(shard)
        start, end = int(offsets[row]), int(offsets[row + 1])
        data = memoryview(self._bytes(entry, start, end))
        variable = sum(size is None for _, _, size in entry.columns)
        lengths = iter(np.frombuffer(data[: 4 * variable], "<u4").tolist() if len(data) >= 4 * variable else ())
        found, place = {}, 4 * variable
        for name, _, size in entry.columns:
            wide = next(lengths, -1) if size is None else size
            if not 0 <= wide <= len(data) - place:
                raise damaged_shard_error(entry, f"sample {row} is shorter than its columns")
            found[name] = bytes(data[place : place + wide])
            place += wide
        return found

    def _cell(self, block: int, row: int, column: str) -> object:
        data = self._sample(block, row)[column]
        kind = next(k for name, k, _ in self._entries[int(self._shard_of[block])].columns if name == column)
        if kind in IMAGES:
            return data
        try:
            text = data.decode()
            return json.loads(text) if kind == "json" else text
        except ValueError:  # not UTF-8, or not JSON
            return data

    def _sizes(self, block: int, columns: tuple[str, str]) -> np.ndarray:
        entry = self._entries[int(self._shard_of[block])]
        kinds = {name: SIZES[kind] for name, kind, _ in entry.columns if name in columns}
        found = np.empty((entry.samples, 2), dtype=np.int64)
        for row in range(entry.samples):
            sample = self._sample(block, row)
            found[row] = [np.frombuffer(sample[name], kinds[name])[0] for name in columns]
        return found

    def _bytes(self, entry: MDSShard, start: int, end: int) -> bytes | bytearray:
        """Read bytes of a shard's verified content."""
        if not entry.compression:
            return self._files.read(self._folder + entry.raw.name, start, end)

        def unzipped() -> tuple[bytes, int]:
            stored = self._files.read(self._folder + entry.file.name, 0, entry.file.bytes)
            verify(entry.file, [stored])
            raw = decompress(stored, entry.compression, entry.raw.bytes, entry.file.name)
            verify(entry.raw, [raw])
            return raw, entry.raw.bytes

        return self._raw.get(entry.raw.name, unzipped)[start:end]

    def _offsets_of(self, shard: int) -> np.ndarray:
        """Read the offsets of a shard's samples, and of the last one's end; verifies the shard's hashes at first
        use."""
        with self._lock:
            if shard in self._offsets:
                return self._offsets[shard]
            entry = self._entries[shard]
            name, end = self._folder + entry.raw.name, entry.raw.bytes
            if not entry.compression and verifiable_hashes(entry.raw.hashes):
                verify(entry.raw, (self._files.read(name, at, min(end, at + PIECE)) for at in range(0, end, PIECE)))
            head = 4 * (entry.samples + 2)
            numbers = np.frombuffer(self._bytes(entry, 0, min(head, end)), "<u4")
            offsets = numbers[1:].astype(np.int64)
            if len(offsets) != entry.samples + 1 or numbers[0] != entry.samples:
                raise damaged_shard_error(entry, f"its head does not list {entry.samples:,} samples, as {INDEX} does")
            if offsets[0] < head or (np.diff(offsets) < 0).any() or offsets[-1] != end:
                raise damaged_shard_error(entry, "its offsets do not follow each other up to its end")
            self._offsets[shard] = numbers[1:]
            return self._offsets[shard]


def verifiable_hashes(hashes: Mapping[str, str]) -> list[str]:
    """Return the algorithms of a file's hashes that Python supports."""
    return sorted(ALGORITHMS.intersection(hashes))


def verify(stored: MDSFile, pieces: Iterable[bytes | bytearray]) -> None:
    """Check a file's content, in pieces, against the index. Raises UserError if it has other hashes."""
    running = {name: hashlib.new(name) for name in verifiable_hashes(stored.hashes)}
    for piece in pieces:
        for each in running.values():
            each.update(piece)
    for name, each in running.items():
        if each.hexdigest() != stored.hashes[name].lower():
            raise UserError(
                f"data.path: {stored.name} is damaged: its {name} is {each.hexdigest()}, and {INDEX} says "
                f"{stored.hashes[name]}. Fetch it again"
            )


def damaged_shard_error(entry: MDSShard, why: str) -> UserError:
    return UserError(f"data.path: {entry.file.name} is damaged: {why}. Fetch or write it again")


def read_index(data: bytes | bytearray, place: str) -> list[MDSShard]:
    """Read an index, which ``place`` names in messages. Raises UserError if it is not that of an MDS data set."""
    found = []
    try:
        for shard in json.loads(data)["shards"]:
            if (shard["format"], shard["version"]) != ("mds", 2):
                raise ValueError(f"a shard of the format {shard['format']!r}, version {shard['version']!r}")
            compression = shard.get("compression") or ""
            if not isinstance(compression, str):
                raise ValueError(f"the compression {compression!r}")
            zipped = _stored(shard["zip_data"]) if compression else None
            columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
            checked = tuple((str(name), str(kind), _width(kind, size)) for name, kind, size in columns)
            raw, samples = _stored(shard["raw_data"]), _number(shard["samples"])
            if 4 * (samples + 2) > raw.bytes:  # before anything is reserved for so many
                raise ValueError(f"{samples:,} samples do not fit into the {raw.bytes:,} bytes of {raw.name}")
            if raw.bytes > MOST_RATIO * max(zipped.bytes if zipped else raw.bytes, 1024):  # before it is decompressed
                raise ValueError(f"{raw.name} grows to {raw.bytes:,} bytes, over {MOST_RATIO:,} times what is stored")
            found.append(MDSShard(raw, zipped or raw, compression, samples, checked))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"data.path: {place} is not the index of an MDS data set ({describe_exception(error)})"
        ) from None
    return found


def _stored(entry: Json) -> MDSFile:
    name = name_inside(entry["basename"])
    if name is None:
        raise ValueError(f"{entry['basename']!r} is outside the data set")
    hashes = {str(algorithm): str(value) for algorithm, value in (entry.get("hashes") or {}).items()}
    return MDSFile(name, _number(entry["bytes"]), hashes)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**32:  # offsets in a shard have 32 bits
        raise ValueError(f"{value!r} is no length")
    return value


def _width(kind: object, size: object) -> int | None:
    """Return the bytes of a column in each sample; None: it varies."""
    if size is None and kind not in SIZES:
        return None
    width = _number(size)
    if kind in SIZES and width != SIZES[str(kind)].itemsize:
        raise ValueError(f"a column of {kind!r} with {width} bytes")
    return width


def decompress(data: bytes | bytearray, compression: str, size: int, name: str) -> bytes:
    """Decompress a file to its announced size in bytes, and never write more; the level in ``zstd:3`` may be missing.

    Raises:
        UserError: the algorithm is unknown, or the file is damaged.
    """
    import pyarrow as pa

    algorithm = compression.partition(":")[0]
    try:
        if algorithm in CODECS:
            found = pa.Codec(CODECS[algorithm]).decompress(data, decompressed_size=size, asbytes=True)
        elif algorithm == "gz":
            found = zlib.decompressobj(wbits=31).decompress(data, size + 1)
        elif algorithm == "bz2":
            found = bz2.BZ2Decompressor().decompress(data, size + 1)
        else:
            known = ", ".join([*CODECS, *OTHERS])
            raise UserError(f"data.path: {name} is compressed with {compression!r}, which is unsupported. Use {known}")
    except (pa.ArrowException, OSError, ValueError, zlib.error) as error:
        raise UserError(f"data.path: {name} is damaged: it cannot be decompressed ({error}). Fetch it again") from None
    if len(found) != size:
        raise UserError(
            f"data.path: {name} is damaged: it decompresses to {len(found):,} bytes instead of {size:,}. Fetch it again"
        )
    return found
