"""Open a data set in shards, of the kind that it says it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from simpletune.options import UserError
from simpletune.streams.columns import Columns
from simpletune.streams.files import Files, LocalFiles
from simpletune.streams.mds import INDEX, MDSRows
from simpletune.streams.parquet import ParquetRows
from simpletune.streams.rows import ShardedRows

Format = Literal["auto", "parquet", "mds"]


def open_rows(place: str, columns: Columns, kind: Format = "auto", split: str | None = None) -> ShardedRows:
    """Open a data set and read its index.

    Args:
        place: where it is: a file, a folder, or a pattern.
        columns: those that are read.
        kind: of its shards; ``auto``: mds if there is an index.json.
        split: text in the names of the parquet files, or the folder with index.json.

    Raises:
        UserError: it is missing or damaged, or lacks a column.
    """
    files = files_at(place)
    if kind == "auto":
        index = INDEX if split is None else f"{split}/{INDEX}"
        kind = "mds" if index in files.sizes(INDEX) else "parquet"
    return MDSRows(files, columns, split) if kind == "mds" else ParquetRows(files, columns, split)


def files_at(place: str) -> Files:
    """The files at a place.

    Raises:
        UserError: nothing is there.
    """
    files = LocalFiles(place)
    if not files.root.exists():
        raise UserError(
            f"data.path: {place} does not exist. Give a parquet file, a folder, or a pattern ({Path.cwd()})"
        )
    return files
