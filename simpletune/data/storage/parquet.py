"""Rows of parquet files. Footers locate the row groups; a row group is read when one of its rows is needed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from simpletune.data.storage.rows import (
    MAX_BLOCK,
    Block,
    Columns,
    LruCache,
    Shard,
    ShardedRows,
    require_columns,
)
from simpletune.data.storage.shard_files import PARQUET, DataFiles
from simpletune.system.options import UserError
from simpletune.system.printable import describe_exception

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, Table
    from pyarrow.parquet import FileMetaData, ParquetFile

MOST_CAPTIONS = 2**26  # bytes of captions in memory
OPEN = 16  # files


class ParquetRows(ShardedRows):
    """The rows of parquet files, in the order of their names.

    Args:
        files: where they are.
        columns: the columns to read.
        split: text that the files' names must contain.

    Raises:
        UserError: there is no file, one is damaged, or a column is missing.
    """

    def __init__(self, files: DataFiles, columns: Columns, split: str | None = None):
        self._files, self._lock = files, threading.Lock()
        self._open = lru_cache(maxsize=OPEN)(self._open_file)
        self._images: LruCache[ChunkedArray] = LruCache()
        self._captions: LruCache[ChunkedArray] = LruCache(MOST_CAPTIONS)
        shards, blocks = list[Shard](), list[Block]()
        for name, size in files.shards(PARQUET, split).items():
            footer, digest = self._footer(name, size, columns)
            shards.append(Shard(name, footer.num_rows, digest))
            with explain_damage(name, "its footer"):
                groups = [_block(footer, shards, number, columns) for number in range(footer.num_row_groups)]
                if sum(group.rows for group in groups) != footer.num_rows or any(group.rows < 0 for group in groups):
                    raise ValueError(f"its row groups do not have its {footer.num_rows:,} rows")
            blocks += groups
        super().__init__(files.place, shards, blocks, columns)

    def _footer(self, name: str, size: int, columns: Columns) -> tuple[FileMetaData, str]:
        """Read a file's footer, and a digest of the footer, the file's length and the pictures' column."""
        with explain_damage(name, "its footer"):
            opened = self._open(name)
            if opened.metadata.num_rows:
                require_columns(columns, opened.schema_arrow.names, name)
            tail = self._files.read(name, size - 8, size)
            footer = self._files.read(name, size - 8 - int.from_bytes(tail[:4], "little"), size)
            about = json.dumps([size, hashlib.sha256(footer).hexdigest(), columns.image])
            found = opened.metadata
            opened.close()
        return found, hashlib.sha256(about.encode()).hexdigest()

    def _open_file(self, name: str) -> ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self._files.open(name), page_checksum_verification=True)

    def _table(self, block: int, columns: Sequence[str]) -> Table:
        """Read some columns of a row group."""
        name, number = self.shards[self._shard_of[block]].name, int(self._number_of[block])
        with self._lock, explain_damage(name, f"its row group {number}"):
            table = self._open(name).read_row_group(number, columns=list(columns), use_threads=False)
            wanted = int(self.starts[block + 1] - self.starts[block])
            if table.num_rows != wanted:
                raise ValueError(f"{table.num_rows:,} of {wanted:,} rows")
            return table

    def _cell(self, block: int, row: int, column: str) -> object:
        def read() -> tuple[ChunkedArray, int]:
            table = self._table(block, [column])
            return table[column], table.nbytes

        cache = self._captions if column == self.columns.caption else self._images
        with explain_damage(self.shards[self._shard_of[block]].name, f"its column {column}"):
            cell = cache.get(block, read)[row]
            try:
                value: object = cell.as_py()
            except UnicodeDecodeError:
                if not hasattr(cell, "as_buffer"):
                    raise  # the text is within a structure
                return bytes(cell.as_buffer())
        return value

    def _sizes(self, block: int, columns: tuple[str, str]) -> np.ndarray:
        table = self._table(block, columns)
        with explain_damage(self.shards[self._shard_of[block]].name, f"its columns {columns}"):
            return np.stack([table[name].cast("int64").fill_null(0).to_numpy() for name in columns], axis=1)


@contextmanager
def explain_damage(name: str, what: str) -> Iterator[None]:
    """Turn pyarrow's error into one that names the damaged file. Raises UserError instead of it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise UserError(
            f"data.path: {name} is damaged: {what} cannot be read ({describe_exception(error)[:200]}). "
            "Fetch or write it again"
        ) from None


def _block(footer: FileMetaData, shards: list[Shard], number: int, columns: Columns) -> Block:
    """Return the block of a row group in the last shard, with the uncompressed size of its pictures."""
    group, sizes = footer.row_group(number), Counter[str]()
    if group.num_columns != footer.num_columns:  # pyarrow ends the process at a column that the schema lacks
        raise ValueError(f"row group {number} has {group.num_columns} columns, the schema {footer.num_columns}")
    for place in range(group.num_columns):
        column = group.column(place)
        sizes[column.path_in_schema.partition(".")[0]] += column.total_uncompressed_size
    if columns.caption is not None and sizes[columns.caption] > MAX_BLOCK:
        raise UserError(
            f"data.path: {shards[-1].name}: row group {number} has {sizes[columns.caption]:,} bytes of captions; "
            f"the limit is {MAX_BLOCK:,}. Write smaller row groups"
        )
    return Block(len(shards) - 1, number, group.num_rows, sizes[columns.image])
