"""Data sets in shards: parquet, MDS or tar; a run reads only the rows that it uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.data.sources.accounts import Accounts
from simpletune.data.sources.captions import cell_captions, settle_captions
from simpletune.data.sources.image_files import decoding_of, image_size, require_alpha
from simpletune.data.sources.source import Decoding, Mask, RejectedEntry, Scan, Source, SourceImage, UnusableImage
from simpletune.data.sources.walk import account_tables
from simpletune.models.shared.buckets import STEP, Size
from simpletune.system.options import Problem, UserError, plural

if TYPE_CHECKING:
    from simpletune.data.storage.rows import ShardedRows

LOOKED_AT = 1024  # rows that a scan examines as an example
BLOCKS = 16  # parts of the data set that these rows come from


class Stream(Source):
    """Rows of a data set in shards, found by its own index and read when they are needed."""

    source: Literal["stream"] = "stream"
    """Parquet files, an MDS data set (mosaicml-streaming) or tar files (WebDataset) of any number of rows: a folder, a
    pattern (x/*.parquet), a URL (s3://, gs://, az://), or hf://datasets/OWNER/NAME. Only the rows that the run uses are
    read and encoded."""
    format: Literal["auto", "parquet", "mds", "tar"] = "auto"
    """Kind of shards. auto: mds if there is an index.json, tar if there are .tar, .tar.gz or .tgz and no parquet files,
    else parquet."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """Text in the names of the parquet or tar files to use, such as train; for MDS the folder with index.json. null:
    all."""
    image_column: Annotated[str, Field(min_length=1)] = "image"
    """Column of the pictures: bytes, or Hugging Face's {bytes, path}; in MDS bytes, jpeg or png. In tar
    files the ending of their names, such as jpg or cover.jpg; image: that of any kind of picture."""
    caption_column: Annotated[str, Field(min_length=1)] = "text"
    """Column of the captions: strings, or lists of strings; unused if data.prompt is set. In tar files an ending or a
    field of the .json beside the picture; text: .txt, .caption, or this field."""
    width_column: Annotated[str, Field(min_length=1)] = "width"
    """Column of the pictures' widths in pixels, which data.aspect=buckets needs; unused with square, and
    for tar files, whose pictures are measured themselves."""
    height_column: Annotated[str, Field(min_length=1)] = "height"
    """Column of the pictures' heights in pixels."""
    shuffle_window: Annotated[int, Field(ge=1)] = 8192
    """How many rows are shuffled with each other. An epoch visits the row groups (in MDS the shards, of a .tar
    parts of 256 MiB) in random order and shuffles their rows in windows of this size, so a short run reads few of them.
    A larger window mixes better."""
    local_gib: Annotated[float, Field(gt=0)] = 16.0
    """Room in GiB in output.cache for MDS shards and tar files in an object store or on the hub, which are fetched
    whole; the least recently used are removed first. Parquet files are read in ranges."""
    mask: Literal["alpha"] | None = None
    """Learn only, or mostly, from the opaque parts of the pictures (masked training); null: from all of them."""

    streamed: ClassVar[bool] = True

    def scan(self, path: Path) -> Scan:
        """Scan as ``Source`` does, but only ``LOOKED_AT`` rows or fewer, from blocks spread over the data set."""
        rows = self.rows()
        images, rejected = list[SourceImage](), list[RejectedEntry]()
        count = len(rows.starts) - 1  # of blocks, of which BLOCKS evenly spread ones are looked into
        blocks = sorted({place * count // min(BLOCKS, count) for place in range(min(BLOCKS, count))})
        each, starts = LOOKED_AT // len(blocks), rows.starts
        chosen = [row for b in blocks for row in range(starts[b], min(starts[b] + each, starts[b + 1]))]
        for row in chosen:
            try:
                data, read = _bytes(rows, row), partial(_bytes, rows, row)
                found = self.image(rows, row, image_size(data), STEP)
                found = replace(found, decoding=decoding_of(data, self.background))
                if found.mask is not None:
                    require_alpha(data)
                images.append(replace(found, read=read, mask=found.mask and replace(found.mask, read=read)))
            except UnusableImage as reason:
                rejected.append(RejectedEntry(rows.name(row), str(reason)))
        looked = (
            f"{plural(len(chosen), 'row')} of {len(rows):,} were examined, from up to {BLOCKS} parts of the data set"
        )
        notes = (*([looked] if len(chosen) < len(rows) else []), *rows.notes())
        files = account_tables(path, {shard.name for shard in rows.shards}, {}) if path.is_dir() else Accounts()
        images.sort(key=lambda image: image.name)
        return Scan(images, rejected, self.captions_from, notes=notes, files=files)

    def problems(self, path: Path) -> Iterator[Problem]:
        """Check the index without reading a row; the index at a URL is checked only when the run starts."""
        if self.repeats != 1:
            yield Problem(
                "data.repeats",
                f"{self.repeats} is not possible with data.source stream, the only source of a run. Use 1 and more "
                "train.epochs",
            )
        if "://" in self.path:
            return
        try:
            self.rows()
        except UserError as error:
            field, _, message = str(error).partition(": ")
            yield Problem(field, message)

    def rows(self, local: Path | None = None) -> ShardedRows:
        """Open the data set and read its index; ``local`` keeps shards that are fetched whole (None: a temporary
        folder). Raises UserError if it is missing or damaged, or lacks a column."""
        from simpletune.data.storage.dataset import Columns, open_rows

        size = (self.width_column, self.height_column) if self.aspect == "buckets" else None
        columns = Columns(self.image_column, None if self.prompt is not None else self.caption_column, size)
        return open_rows(self.path, columns, self.format, self.split, local, self.local_gib)

    @property
    def captions_from(self) -> str:
        if self.prompt is not None:
            return f"one prompt for all pictures: {self.prompt!r}"
        return f"the column {self.caption_column}"

    def image(self, rows: ShardedRows, row: int, size: Size, step: int) -> SourceImage:
        """Return a row as a picture of the size that its columns give (with squares, that of the square), without
        reading its bytes yet. Raises UnusableImage if its caption cannot be used, UserError if its shard is damaged."""
        if self.prompt is not None:
            captions = [self.prompt]
        else:
            cell, what = rows.caption(row), f"its {self.caption_column}"
            if any(isinstance(text, bytes) for text in (cell if isinstance(cell, list) else [cell])):
                raise UnusableImage(f"{what} is not UTF-8 text")
            captions = cell_captions(cell, what)
        first, *more = captions
        digest, read = rows.key(row), partial(self._read, rows, row, self.bucket(size, step), step)
        mask = Mask("alpha", digest, read, by_row=True) if self.mask == "alpha" else None
        on = "" if self.background == "white" else f", on {self.background}"
        decoding = Decoding(f"each row by its header{on}")  # which nobody has read yet
        found = SourceImage(
            rows.name(row),
            first,
            size,
            digest,
            read,
            more=tuple(more),
            mask=mask,
            by_row=True,
            decoding=decoding,
            background=self.background,
        )
        return settle_captions(found, self.caption_lines == "several") if self.prompt is None else found

    def _read(self, rows: ShardedRows, row: int, bucket: Size, step: int) -> bytes:
        """Read a row's picture, and make the checks that other sources make while scanning. Raises UnusableImage if it
        is missing, damaged or too small, or its aspect ratio differs from its columns, UserError if its shard is
        damaged."""
        value = _bytes(rows, row)
        size = image_size(value)
        if self.bucket(size, step) != bucket:
            raise UnusableImage(f"is {size[0]}x{size[1]}, and its columns say another shape. Fix the columns")
        if reason := self.explain_too_small(size, step, "data.max_upscale"):
            raise UnusableImage(reason)
        if self.mask == "alpha":
            require_alpha(value)
        return value


def _bytes(rows: ShardedRows, row: int) -> bytes:
    """Return the bytes in a row's cell: plain, or in {bytes, path}. Raises UnusableImage if there are none."""
    value = rows.image(row)
    if isinstance(value, dict):
        value = value.get("bytes")
    if not isinstance(value, bytes) or not value:
        raise UnusableImage("its cell contains no picture, or only a path. Write the pictures' bytes")
    return value
