"""Tables of pictures and captions: parquet files and Hugging Face datasets, on disk or on the Hub, read by pyarrow."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from simpletune.data.sources.captions import MAX_BYTES, cell_captions, settle_lines
from simpletune.data.sources.masks import alpha_mask
from simpletune.data.sources.pictures import decoding_of, picture_size
from simpletune.data.sources.source import Picture, RejectedEntry, Scan, Source, UnusablePicture
from simpletune.data.sources.walk import is_outside, read_regular, too_large
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

    Cell: TypeAlias = tuple[pyarrow.Scalar, pyarrow.Scalar | str, Path, int, int]  # picture, caption; chunk, row in it

SUFFIXES = (".parquet", ".arrow")
MAX_GROUP = 2**30  # bytes of one column of one row group, uncompressed


class Table(Source):
    """Rows with a picture and a caption, in parquet files or a dataset saved by Hugging Face's datasets."""

    source: Literal["table"] = "table"
    """Parquet files, a dataset saved to disk (.arrow files), or a dataset on the Hub (owner/name)."""
    image_column: Annotated[str, Field(min_length=1)] = "image"
    """Column of the pictures: bytes, or Hugging Face's {bytes, path}."""
    caption_column: Annotated[str, Field(min_length=1)] = "text"
    """Column of the captions: strings, or lists of strings; unused if data.prompt is set."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split to use from a dataset on the Hub."""
    mask: Literal["alpha"] | None = None
    """Learn only, or mostly, from the opaque parts of the pictures (masked training); null: from all of them."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only this many rows, from the start; null: all rows."""

    def problems(self, path: Path) -> Iterator[Problem]:
        """Check the table without reading it."""
        from simpletune.system.hub import is_hub_name

        if not path.exists():
            if not is_hub_name(self.path):
                remedy = "Give a parquet file, a folder, or a Hub name (owner/name)"
                yield Problem("data.path", f"{self.path} does not exist. {remedy}")
        elif not _table_files(path):
            yield Problem("data.path", f"{self.path} contains no {' or '.join(SUFFIXES)} file. Give a folder with one")

    def scan(self, path: Path) -> Scan:
        """Read every row once for its picture's size, caption and digest.

        Raises:
            UserError: a file cannot be read, or a column is missing.
        """
        if path.exists():
            files = _table_files(path)
        else:  # on the Hub
            from simpletune.system.hub import data_set_folder

            patterns = [f"*{self.split}*.parquet", f"**/*{self.split}*.parquet"]
            files = _table_files(data_set_folder(self.path, patterns), self.split)
        if not files:
            raise UserError(
                f"data.path: {self.path} contains no .parquet file of the split {self.split!r}. Set data.split"
            )
        pictures, rejected, rows = [], [], 0
        for file in files:
            for cell in islice(self._cells(file), None if self.limit is None else self.limit - rows):
                name = f"{file.name}#{rows:08d}"
                rows += 1
                try:
                    pictures.append(self._picture(name, *cell))
                except UnusablePicture as reason:
                    rejected.append(RejectedEntry(name, str(reason)))
        described = (
            f"the column {self.caption_column}"
            if self.prompt is None
            else f"one prompt for all pictures: {self.prompt!r}"
        )
        if self.prompt is None:
            pictures, unsettled, described = settle_lines(pictures, described, self.caption_lines == "several")
            rejected += unsettled
        return Scan(pictures, rejected, described)

    def _cells(self, file: Path) -> Iterator[Cell]:
        """Yield the pictures and captions of a file, row by row."""
        columns = [self.image_column, *([self.caption_column] if self.prompt is None else [])]
        opened = _open(file)
        if isinstance(opened, list):
            known, chunks = (list(opened[0].schema.names) if opened else []), len(opened)
        else:
            known, chunks = list(opened.schema_arrow.names), opened.num_row_groups
        for column in columns:
            if column not in known:
                field = "image_column" if column == self.image_column else "caption_column"
                raise UserError(f"data.{field}: {file.name} has no column {column!r}. Use one of: {', '.join(known)}")
        for number in range(chunks):
            if not isinstance(opened, list):
                _require_small(file, opened.metadata.row_group(number), number, columns, self.caption_column)
            row = 0
            for batch in _batches(file, number, columns):
                images, captions = batch[self.image_column], batch[self.caption_column] if self.prompt is None else None
                for place in range(len(images)):
                    caption = self.prompt or "" if captions is None else captions[place]
                    yield images[place], caption, file, number, row
                    row += 1

    def _picture(
        self, name: str, image: pyarrow.Scalar, caption: pyarrow.Scalar | str, file: Path, number: int, row: int
    ) -> Picture:
        what = f"its {self.caption_column}"
        if isinstance(caption, str):
            captions = [caption]
        elif (length := _text_bytes(caption)) > MAX_BYTES:
            raise UnusablePicture(f"{what} {too_large(length, MAX_BYTES)}")
        else:
            try:
                captions = cell_captions(caption.as_py(), what)
            except UnicodeDecodeError:
                raise UnusablePicture(f"{what} is not UTF-8 text") from None
        first, *more = captions
        data = _bytes_of(image.as_py(), file)
        read, digest = partial(_read_again, file, number, self.image_column, row), hashlib.sha256(data).hexdigest()
        size = picture_size(data)
        mask = alpha_mask(data, digest, read) if self.mask == "alpha" else None
        decoding = decoding_of(data, self.background)
        return Picture(name, first, size, digest, read, more=tuple(more), mask=mask, decoding=decoding)


def _table_files(path: Path, split: str = "") -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    return sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file() and split in f.name)


@lru_cache(maxsize=8)
def _open(file: Path) -> pyarrow.parquet.ParquetFile | list[pyarrow.RecordBatch]:
    """Open a parquet file, or the record batches of an arrow file (memory-mapped).

    Raises:
        UserError: the file is neither, or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix == ".parquet":
            return pq.ParquetFile(file)
        with pa.memory_map(str(file)) as source:
            return list(pa.ipc.open_stream(source))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data.path: {file} is damaged or not a {file.suffix} file ({error})") from None


def _require_small(
    file: Path, group: pyarrow.parquet.RowGroupMetaData, number: int, columns: Collection[str], caption_column: str
) -> None:
    """Check that a row group's columns are small enough to read. UserError: one is too large."""
    sizes: Counter[str] = Counter()
    for place in range(group.num_columns):
        column = group.column(place)
        sizes[column.path_in_schema.partition(".")[0]] += column.total_uncompressed_size
    for name in columns:
        most = min(MAX_GROUP, (MAX_BYTES + 64) * group.num_rows) if name == caption_column else MAX_GROUP
        if sizes[name] > most:
            raise UserError(
                f"data.path: {file}: the column {name!r} of row group {number} has {sizes[name]:,} bytes in "
                f"{group.num_rows:,} rows; the limit is {most:,}. Write smaller row groups, or fix the column"
            )


def _batches(file: Path, number: int, columns: list[str]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the columns of one row group or record batch in parts. UserError: the file is damaged."""
    import pyarrow as pa

    opened = _open(file)
    try:
        if isinstance(opened, list):
            yield opened[number].select(columns)
        else:
            group = opened.metadata.row_group(number)
            # Dictionary encoding may store a large value once and use it in every row: few enough rows to fit then, too
            rows = max(1, min(group.num_rows, MAX_GROUP // max(1, group.total_byte_size)))
            yield from opened.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"data.path: {file} is damaged ({error})")


def _text_bytes(cell: pyarrow.Scalar) -> int:
    """The size of a cell of strings in bytes, without converting it to Python; 0 for other types."""
    import pyarrow as pa

    if cell.is_valid and (pa.types.is_list(cell.type) or pa.types.is_large_list(cell.type)):
        return int(cell.values.nbytes)

    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not cell.is_valid or not any(is_kind(cell.type) for is_kind in kinds):
        return 0
    return int(cell.as_buffer().size)


@lru_cache(maxsize=1)
def _chunk(file: Path, number: int, column: str) -> pyarrow.Table:
    """Read the pictures of one row group or record batch. Caches only the last, because rows are read in order."""
    import pyarrow as pa

    opened = _open(file)
    try:
        if isinstance(opened, list):
            return pa.Table.from_batches([opened[number].select([column])])
        return opened.read_row_group(number, columns=[column])
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, error) from None


def _bytes_of(value: object, file: Path) -> bytes:
    """Read a picture's bytes from a cell: bytes, or {bytes, path} with a path inside the table's folder.

    Raises:
        UnusablePicture: the cell contains neither.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        if "\0" in value:
            raise UnusablePicture(f"its path {value!r} is not a valid file name")
        if is_outside(file.parent / value, file.parent):
            raise UnusablePicture(f"its path {value!r} is outside the dataset's folder")
        try:
            return read_regular(file.parent / value)
        except UnusablePicture as reason:
            raise UnusablePicture(f"its file {value!r} {reason}") from None
    raise UnusablePicture("its cell contains no picture")


def _read_again(file: Path, number: int, column: str, row: int) -> bytes:
    return _bytes_of(_chunk(file, number, column)[column][row].as_py(), file)
