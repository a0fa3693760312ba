"""Open a data set in shards, of the configured kind."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from simpletune.data.storage.mds import INDEX, MDSRows
from simpletune.data.storage.parquet import ParquetRows
from simpletune.data.storage.rows import Columns, ShardedRows
from simpletune.data.storage.shard_files import PARQUET, TARS, DataFiles
from simpletune.data.storage.tars import TarRows


def open_rows(
    place: str,
    columns: Columns,
    kind: Literal["auto", "parquet", "mds", "tar"] = "auto",
    split: str | None = None,
    local: Path | None = None,
    local_gib: float = 16.0,
) -> ShardedRows:
    """Open a data set and read its index. Raises UserError if it is missing or damaged, or lacks a column.

    Args:
        place: a file, a folder, a pattern, or a URL of one of them.
        split: text in the names of the parquet or tar files, or the folder with index.json.
        local: the folder for shards that are fetched whole; None: a temporary folder.
    """
    files = DataFiles(place)
    if kind == "auto":  # MDS data sets have an index.json
        index = INDEX if split is None else f"{split}/{INDEX}"
        known = files.sizes()
        only_tars = any(name.endswith(TARS) for name in known) and not any(name.endswith(PARQUET) for name in known)
        kind = "mds" if index in known else "tar" if only_tars else "parquet"
    if kind == "parquet":
        return ParquetRows(files, columns, split)
    files.keep_copies(local, int(local_gib * 2**30))
    return (TarRows if kind == "tar" else MDSRows)(files, columns, split)
