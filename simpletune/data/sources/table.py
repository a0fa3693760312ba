"""Tables of pictures and captions: parquet files and Hugging Face datasets, on disk or on the Hub, read by pyarrow."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from simpletune.data.sources.accounts import Accounts
from simpletune.data.sources.captions import MAX_BYTES, cell_captions, settle_lines
from simpletune.data.sources.folder_names import SPLITS, split_of_word
from simpletune.data.sources.image_files import decoding_of, image_size
from simpletune.data.sources.masks import alpha_mask
from simpletune.data.sources.source import RejectedEntry, Scan, Source, SourceImage, UnusableImage
from simpletune.data.sources.walk import account_tables, format_too_large, is_outside, read_regular
from simpletune.system.options import Problem, UserError, join_names, plural
from simpletune.system.printable import printable_name

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

    Cell: TypeAlias = tuple[pyarrow.Scalar, pyarrow.Scalar | str, Path, int, int]  # picture, caption; chunk, row in it

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather")
SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")
STATE, SPLIT_LIST = "state.json", "dataset_dict.json"  # of save_to_disk
BASE64 = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # the begin of a PNG, JPEG, GIF and WebP
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
    """Split to use, of a dataset on the Hub or on disk: train, validation, test, or another name. If it is not set,
    local files of which none is named after the split train are used whole."""
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
        else:
            try:
                self._files(path)
            except UserError as error:
                field, _, message = str(error).partition(": ")
                yield Problem(field, message)

    def scan(self, path: Path) -> Scan:
        """Read every row once for its picture's size, caption and digest.

        Raises:
            UserError: a file cannot be read, or a column is missing.
        """
        if path.exists():
            files, notes = self._files(path)
        else:  # on the Hub
            from simpletune.system.hub import data_set_folder

            words = SPLITS.get(wanted := split_of_word(self.split), (self.split,))
            folder = data_set_folder(self.path, [f"*{word}*.parquet" for word in words])
            held, notes = [file for file in _table_files(folder) if file.suffix == ".parquet"], []
            files = [file for file in held if _split_of(folder, file) == wanted]
            files = files or [file for file in held if self.split in file.name]
            if not files:
                raise UserError(
                    f"data.path: {self.path} contains no .parquet file of the split {self.split!r}. Set data.split"
                )
        self._require_columns(files)
        images, rejected, rows = [], [], 0
        for file in files:
            for cell in islice(self._cells(file), None if self.limit is None else self.limit - rows):
                name = f"{file.name}#{rows:08d}"
                rows += 1
                try:
                    images.append(self._image(name, *cell))
                except UnusableImage as reason:
                    rejected.append(RejectedEntry(name, str(reason)))
        described = (
            f"the column {self.caption_column}"
            if self.prompt is None
            else f"one prompt for all pictures: {self.prompt!r}"
        )
        if self.prompt is None:
            images, unsettled, described = settle_lines(images, described, self.caption_lines == "several")
            rejected += unsettled
        accounts = Accounts()
        if path.is_dir():
            used = {file.relative_to(path).as_posix() for file in files}
            names = {file.relative_to(path).as_posix() for file in _table_files(path)}
            left = dict.fromkeys(names - used, "not of this data set, or of another split")
            accounts = account_tables(path, used, left)
        return Scan(images, rejected, described, notes=tuple(notes), files=accounts)

    def _files(self, path: Path) -> tuple[list[Path], list[str]]:
        """List the files on disk to read, and notes about those that are left out.

        Raises:
            UserError: the split is not there, or ``state.json`` names what is not there.
        """
        files = _table_files(path)
        if not files:
            raise UserError(f"data.path: {self.path} contains no table ({', '.join(SUFFIXES)}). Give a folder with one")
        if path.is_file():
            return files, []
        kept, notes = [], []
        for folder in sorted({file.parent for file in files}):
            kept += _saved_files(folder, [file for file in files if file.parent == folder])
        if left := sorted({file.name for file in set(files) - set(kept)}):
            about = plural(len(files) - len(kept), "file is", "files are")
            notes.append(f"{about} left out, which datasets keeps beside its data: {join_names(left)}")
        if not kept:
            raise UserError(f"data.path: {self.path} contains no data but {join_names(left)}. Give the file to read it")
        splits, wanted = {file: _split_of(path, file) for file in kept}, split_of_word(self.split)
        known = sorted({split for split in splits.values() if split is not None})
        chosen = [file for file in kept if splits[file] == wanted]
        if not chosen and wanted not in SPLITS:
            chosen = [file for file in kept if self.split in file.relative_to(path).as_posix()]
        if not chosen and (self.split == "train" and not (known and "split" in self.model_fields_set)):
            if known:
                notes.append(
                    f"no file is of the split train, so all are used, those of {join_names(known)} too. Set data.split"
                )
            return kept, notes
        if not chosen:
            remedy = f"only {join_names(known)}. Use one of them" if known else "its files name none. Leave it out"
            raise UserError(f"data.split: {self.path} has no split {self.split!r}, {remedy}")
        others = {splits[file] or "no split" for file in set(kept) - set(chosen)}
        if others:
            notes.append(
                f"the split {self.split} is used (data.split): {plural(len(chosen), 'file')} of {len(kept)}, without "
                f"those of {join_names(sorted(others))}"
            )
        return chosen, notes

    def _require_columns(self, files: Sequence[Path]) -> None:
        """Check that every file has the columns to read, before any row is. Raises UserError if one has not."""
        columns = {"image_column": self.image_column}
        if self.prompt is None:
            columns["caption_column"] = self.caption_column
        known = {file: _open(file).names for file in files}
        for field, column in columns.items():
            lacking = [file for file in files if column not in known[file]]
            if not lacking:
                continue
            file, own = lacking[0], join_names([printable_name(name) for name in known[lacking[0]]])
            if len(lacking) < len(files):
                other = next(each.name for each in files if each not in lacking)
                raise UserError(
                    f"data.path: {printable_name(file.name)} has no column {column!r}, only {own}; "
                    f"{printable_name(other)} has it. Move what is not of the data set "
                    "elsewhere, or give the path of one file"
                )
            raise UserError(f"data.{field}: {printable_name(file.name)} has no column {column!r}. Use one of: {own}")

    def _cells(self, file: Path) -> Iterator[Cell]:
        """Yield the pictures and captions of a file, row by row."""
        columns = [self.image_column, *([self.caption_column] if self.prompt is None else [])]
        opened = _open(file)
        for number in range(opened.chunks):
            if opened.parquet is not None:
                group = opened.parquet.metadata.row_group(number)
                _require_small(file, group, number, columns, self.caption_column)
            row = 0
            for batch in _batches(file, number, columns):
                images, captions = batch[self.image_column], batch[self.caption_column] if self.prompt is None else None
                for place in range(len(images)):
                    caption = self.prompt or "" if captions is None else captions[place]
                    yield images[place], caption, file, number, row
                    row += 1

    def _image(
        self, name: str, image: pyarrow.Scalar, caption: pyarrow.Scalar | str, file: Path, number: int, row: int
    ) -> SourceImage:
        what = f"its {self.caption_column}"
        if isinstance(caption, str):
            captions = [caption]
        elif (length := _text_bytes(caption)) > MAX_BYTES:
            raise UnusableImage(f"{what} {format_too_large(length, MAX_BYTES)}")
        else:
            try:
                captions = cell_captions(caption.as_py(), what)
            except UnicodeDecodeError:
                raise UnusableImage(f"{what} is not UTF-8 text") from None
        first, *more = captions
        value = image.as_py()
        if isinstance(text := value.get("path") if isinstance(value, dict) else value, str) and text.startswith(BASE64):
            raise UserError(
                f"data.image_column: {file.name}: the column {self.image_column!r} holds pictures as base64 text. "
                "Write their bytes (base64.b64decode of each), or name another column"
            )
        data = _bytes_of(value, file)
        read, digest = partial(_read_again, file, number, self.image_column, row), hashlib.sha256(data).hexdigest()
        size = image_size(data)
        mask = alpha_mask(data, digest, read) if self.mask == "alpha" else None
        decoding = decoding_of(data, self.background)
        return SourceImage(
            name, first, size, digest, read, more=tuple(more), mask=mask, decoding=decoding, background=self.background
        )


def _table_files(path: Path) -> list[Path]:
    """List the tables that a path names or holds. Raises UserError if a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise UserError(
            f"data.path: {error.filename} cannot be read ({error.strerror}). Allow it, or move it elsewhere"
        )

    if path.is_file():
        return [path] if path.suffix.lower() in SUFFIXES else []
    names = (Path(folder) / name for folder, _, files in os.walk(path, onerror=refuse) for name in files)
    return sorted(file for file in names if file.suffix.lower() in SUFFIXES and os.path.isfile(file))


def _saved_files(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Return those tables in a folder that hold its data: not what datasets' ``map`` and ``shuffle`` write there.

    Raises:
        UserError: its state.json names a file that is not there, or rows to choose by their numbers.
    """
    try:
        state = json.loads(read_regular(folder / STATE))
        listed = {each["filename"] for each in state["_data_files"]}
        chosen = bool(state.get("_indices_data_files") or state.get("_indices_files"))
    except (UnusableImage, ValueError, TypeError, KeyError, AttributeError):  # there is none, or it is another tool's
        return [file for file in files if not file.name.startswith("cache-") or file.suffix != ".arrow"]
    if chosen:
        raise UserError(
            f"data.path: {folder} is a selection of the rows of its files, which is not read. Save it after "
            "flatten_indices()"
        )
    if missing := sorted(listed - {file.name for file in files}):
        raise UserError(f"data.path: {folder} lacks {join_names(missing)}, which its {STATE} lists. Copy it again")
    return [file for file in files if file.name in listed]


def _split_of(root: Path, file: Path) -> str | None:
    """Return the split that the names of a file and of its folders below ``root`` say, the file's own first; None: they
    say none."""
    within = file.relative_to(root)
    if (root / SPLIT_LIST).is_file() and len(within.parts) > 1:
        return split_of_word(within.parts[0])  # a folder for each split
    shard = SHARD.match(file.stem)
    if shard and file.parent.name == "data" and shard[1] != "data":
        return split_of_word(shard[1])
    for name in (file.stem, *reversed(within.parts[:-1])):
        words = re.split(r"[^a-z0-9]+", name.lower())
        for split, known in SPLITS.items():
            if any(word in known for word in words):
                return split
    return None


class _Opened:
    """A parquet file, or record batches: of Arrow's stream format as of its file format (Feather), memory-mapped.

    Attributes:
        names: its columns.
        chunks: the number of its row groups or record batches.
        parquet: the file, if it is parquet.
    """

    def __init__(self, file: Path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.parquet: pyarrow.parquet.ParquetFile | None = None
        if file.suffix.lower() in (".parquet", ".pq"):
            self.parquet = pq.ParquetFile(file)
            self.names, self.chunks = list(self.parquet.schema_arrow.names), self.parquet.num_row_groups
            return
        source = pa.memory_map(str(file))
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            self.batch, self.chunks = reader.get_batch, reader.num_record_batches
        else:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            batches = list(reader)
            self.batch, self.chunks = batches.__getitem__, len(batches)
        self.names = list(reader.schema.names)


@lru_cache(maxsize=8)
def _open(file: Path) -> _Opened:
    """Open a file. Raises UserError if it cannot be read, is of another kind than its suffix says, or damaged."""
    import pyarrow as pa

    try:
        return _Opened(file)
    except (FileNotFoundError, PermissionError) as error:
        reason = "is gone" if isinstance(error, FileNotFoundError) else "cannot be read (Permission denied)"
        raise UserError(f"data.path: {file} {reason}. Restore it, or allow this user to read it") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data.path: {file} is damaged or not a {file.suffix} file ({error})") from None


def _require_small(
    file: Path, group: pyarrow.parquet.RowGroupMetaData, number: int, columns: Collection[str], caption_column: str
) -> None:
    """Check that a row group's columns are small enough to read. Raises UserError if one is too large."""
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
    """Yield the columns of one row group or record batch in parts. Raises UserError if the file is damaged."""
    import pyarrow as pa

    opened = _open(file)
    try:
        if opened.parquet is None:
            yield opened.batch(number).select(columns)
        else:
            group = opened.parquet.metadata.row_group(number)
            # Dictionary encoding may store a large value once and use it in every row: few enough rows to fit then, too
            rows = max(1, min(group.num_rows, MAX_GROUP // max(1, group.total_byte_size)))
            yield from opened.parquet.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"data.path: {file} is damaged ({error})")


def _text_bytes(cell: pyarrow.Scalar) -> int:
    """Return the size of a cell of strings in bytes, without converting it to Python; 0 for other types."""
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
        if opened.parquet is None:
            return pa.Table.from_batches([opened.batch(number).select([column])])
        return opened.parquet.read_row_group(number, columns=[column])
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, error) from None


def _bytes_of(value: object, file: Path) -> bytes:
    """Read a picture's bytes from a cell: bytes, or {bytes, path} with a path inside the table's folder.

    Raises:
        UnusableImage: the cell contains neither.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        if "\0" in value:
            raise UnusableImage(f"its path {printable_name(value)!r} is not a valid file name")
        if is_outside(file.parent / value, file.parent):
            raise UnusableImage(f"its path {printable_name(value)!r} is outside the dataset's folder")
        try:
            return read_regular(file.parent / value)
        except UnusableImage as reason:
            raise UnusableImage(f"its file {printable_name(value)!r} {reason}") from None
    raise UnusableImage("its cell contains no picture")


def _read_again(file: Path, number: int, column: str, row: int) -> bytes:
    return _bytes_of(_chunk(file, number, column)[column][row].as_py(), file)
