"""Rows of a data set in shards, addressed by number: arrays locate each row, which is read when needed."""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import IO, Generic, NamedTuple, TypeVar

import numpy as np

from simpletune.system.options import UserError

BLOCKS_IN_MEMORY = 2**28  # bytes; always holds at least one block
MAX_BLOCK = 2**30  # limit in bytes of an uncompressed block: a row group's pictures, or a shard of an MDS data set

Value = TypeVar("Value")


@dataclass(frozen=True)
class Columns:
    """The columns to read from a data set.

    Args:
        picture: the column of the pictures' bytes.
        caption: the column of the captions; None: there is one prompt for all.
        size: the columns of the pictures' widths and heights in pixels; None: they are not needed.
    """

    image: str
    caption: str | None
    size: tuple[str, str] | None = None

    def by_field(self) -> dict[str, str]:
        """Return the columns, by the configuration field that names them."""
        found = {"image_column": self.image}
        if self.caption is not None:
            found["caption_column"] = self.caption
        return found | (dict(zip(("width_column", "height_column"), self.size, strict=True)) if self.size else {})


def require_columns(columns: Columns, known: Sequence[str], where: str) -> None:
    """Check the columns to read against the known ones, which the file ``where`` lists. Raises UserError if one is
    missing."""
    for field, name in columns.by_field().items():
        if name in known:
            continue
        more = " (data.aspect=square needs no sizes)" if field in ("width_column", "height_column") else ""
        raise UserError(f"data.{field}: {where} has no column {name!r}. Use one of: {', '.join(known)}{more}")


class Shard(NamedTuple):
    """A file of a data set."""

    name: str  # its path relative to the data set
    rows: int
    digest: str  # SHA-256 of what identifies its content: its hashes in the index, or its footer and length


class Block(NamedTuple):
    """Rows that are read together: a row group, or a whole shard."""

    shard: int  # its number
    number: int  # within the shard
    rows: int
    bytes: int  # memory that its pictures take


class LruCache(Generic[Value]):
    """The most recently read blocks, up to a number of bytes. Thread-safe; only one thread reads a block at a time."""

    def __init__(self, most: int = BLOCKS_IN_MEMORY):
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[], tuple[Value, int]]) -> Value:
        """Return a block's value; if it is not held, ``read`` returns it and its size in bytes."""
        with self._lock:
            if key not in self._values:
                self._values[key] = read()
            self._values.move_to_end(key)
            while len(self._values) > 1 and sum(size for _, size in self._values.values()) > self._most:
                self._values.popitem(last=False)
            return self._values[key][0]


class Notes:
    """JSON values by row in a temporary file, so that nothing is read from the shards twice."""

    def __init__(self, rows: int):
        self._places = np.full(rows, -1, dtype=np.int64)
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def get(self, row: int, read: Callable[[], object]) -> object:
        """Return a row's value; an unknown one is read and stored, unless JSON cannot represent it."""
        if (place := int(self._places[row])) >= 0:
            with self._lock:
                assert self._file is not None
                self._file.seek(place)
                return json.loads(self._file.read(int.from_bytes(self._file.read(4), "little")))
        value = read()
        try:
            text = json.dumps(value).encode()
        except (TypeError, ValueError):
            return value
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="simpletune-")
            self._places[row] = self._file.seek(0, 2)
            self._file.write(len(text).to_bytes(4, "little") + text)
        return value


class ShardedRows(ABC):
    """The rows of a data set in shards. A format extends it and reads the cells.

    Args:
        place: where the data set is, for messages.
        shards: its files, in order.
        blocks: their blocks, in order; skips empty ones.
        columns: the columns to read.

    Raises:
        UserError: it has no rows, or a block is too large to hold.
    """

    def __init__(self, place: str, shards: Sequence[Shard], blocks: Sequence[Block], columns: Columns):
        self.place, self.shards, self.columns = place, list(shards), columns
        blocks = [block for block in blocks if block.rows]
        if not blocks:
            raise UserError(f"data.path: {place} has no rows. Name a data set with pictures")
        for block in blocks:
            if block.bytes > MAX_BLOCK:
                raise UserError(
                    f"data.path: {self.shards[block.shard].name}: block {block.number} has {block.bytes:,} bytes of "
                    f"pictures; the limit is {MAX_BLOCK:,}. Write smaller row groups or shards"
                )
        self._shard_of = np.array([block.shard for block in blocks], dtype=np.int64)
        self._number_of = np.array([block.number for block in blocks], dtype=np.int64)
        self.block_bytes = np.array([block.bytes for block in blocks], dtype=np.int64)
        self.starts = np.cumsum([0, *(block.rows for block in blocks)], dtype=np.int64)
        """The first row of each block, then the number of all rows."""
        self._shard_starts = np.cumsum([0, *(shard.rows for shard in self.shards)], dtype=np.int64)
        self._notes = Notes(len(self))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def notes(self) -> list[str]:
        """Return notes for the user about the data set."""
        return []

    def blocks_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, rows, side="right") - 1

    def name(self, row: int) -> str:
        """Return a row's name for messages: its shard and its number there."""
        shard, within = _locate(self._shard_starts, row)
        return f"{self.shards[shard].name}#{within:08d}"

    def key(self, row: int) -> str:
        """Return the SHA-256 of a row's shard and its number there, which needs no reading of the row."""
        shard, within = _locate(self._shard_starts, row)
        return hashlib.sha256(f"{self.shards[shard].digest}:{within}".encode()).hexdigest()

    def caption(self, row: int) -> object:
        """Read a row's caption cell; None if there is one prompt for all."""
        column = self.columns.caption
        if column is None:
            return None
        return self._notes.get(row, lambda: self._cell(*_locate(self.starts, row), column))

    def image(self, row: int) -> object:
        """Read a row's picture cell. Raises UserError if its shard is damaged."""
        return self._cell(*_locate(self.starts, row), self.columns.image)

    def sizes(self) -> np.ndarray:
        """Read the pictures' (width, height) from the size columns: int64 [rows, 2]. Raises UserError if a shard is
        damaged, or a size is not positive."""
        assert self.columns.size is not None
        found = np.concatenate([self._sizes(block, self.columns.size) for block in range(len(self.block_bytes))])
        bad = np.flatnonzero((found <= 0).any(axis=1))
        if len(bad):
            raise UserError(
                f"data.width_column: {self.name(int(bad[0]))} has the size {tuple(map(int, found[bad[0]]))}; sizes are "
                "at least 1. Fix the columns, or use data.aspect=square, which needs none"
            )
        return found

    @abstractmethod
    def _cell(self, block: int, row: int, column: str) -> object:
        """Read the picture's or caption's cell in a row of a block; bytes for text that is not UTF-8. Raises
        UnusableImage if it cannot be used."""

    @abstractmethod
    def _sizes(self, block: int, columns: tuple[str, str]) -> np.ndarray:
        """Read the sizes of a block's pictures: int64 [rows, 2]."""


def _locate(starts: np.ndarray, row: int) -> tuple[int, int]:
    """Return the number of the shard or block that has a row, and the row's number there."""
    number = int(np.searchsorted(starts, row, side="right")) - 1
    return number, row - int(starts[number])
