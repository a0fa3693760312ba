"""Rows of a data set in shards as samples, made one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np

from simpletune.data.samples import Sample
from simpletune.data.sources.stream import Stream
from simpletune.data.storage.rows import BLOCKS_IN_MEMORY, ShardedRows
from simpletune.models.shared.buckets import Size
from simpletune.system.options import UserError, plural
from simpletune.system.rng import stream


@dataclass(frozen=True)
class StreamedSamples(Sequence[Sample]):
    """Rows of a data set as samples, made one by one.

    Args:
        source: the options.
        rows: the data set.
        step: sides of buckets are multiples of this, in pixels.
        numbers: the rows: int64 [n].
        bucket: the bucket of each, as an index of ``sizes``: int64 [n].
        sizes: the buckets, sorted.
        shapes: (width, height) of each row by its columns: int64 [n, 2]; None: not known.
    """

    source: Stream
    rows: ShardedRows
    step: int
    numbers: np.ndarray
    bucket: np.ndarray
    sizes: tuple[Size, ...]
    shapes: np.ndarray | None

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Return one sample, or several. Raises UnusableImage if a caption cannot be used, UserError if a shard is
        damaged."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        bucket = self.sizes[self.bucket[index]]
        size = bucket if self.shapes is None else (int(self.shapes[index, 0]), int(self.shapes[index, 1]))
        return Sample(self.source.image(self.rows, int(self.numbers[index]), size, self.step), bucket, 0)

    def take(self, places: np.ndarray) -> StreamedSamples:
        """Select some of the samples."""
        shapes = None if self.shapes is None else self.shapes[places]
        return replace(self, numbers=self.numbers[places], bucket=self.bucket[places], shapes=shapes)

    def without_captions(self) -> StreamedSamples:
        """Return these samples without their captions, which saves reading them."""
        return replace(self, source=self.source.model_copy(update={"prompt": "-"}))

    def name(self, index: int) -> str:
        """Return the name of a sample's row."""
        return self.rows.name(int(self.numbers[index]))

    def parts(self, places: np.ndarray) -> np.ndarray:
        """Return each sample's part, int64 [n]: the pictures of a part fit into memory together. ``places`` are in the
        order of the rows."""
        blocks = self.rows.blocks_of(self.numbers[places])
        first = np.diff(blocks, prepend=-1) != 0
        return np.cumsum(np.where(first, self.rows.block_bytes[blocks], 0)) // BLOCKS_IN_MEMORY


def streamed_samples(source: Stream, step: int, local: Path) -> StreamedSamples:
    """Open all rows of a data set.

    Args:
        source: the options, with ``demo:`` names resolved.
        step: sides of buckets are multiples of this, in pixels.
        local: keeps shards that are fetched whole.

    Raises:
        UserError: it is missing or damaged, or lacks a column.
    """
    rows = source.rows(local)
    numbers = np.arange(len(rows), dtype=np.int64)
    if source.aspect == "square":
        size = source.resolution, source.resolution
        return StreamedSamples(source, rows, step, numbers, np.zeros_like(numbers), (size,), None)
    shapes = rows.sizes()
    different, of = np.unique(shapes, axis=0, return_inverse=True)
    found = [source.bucket((int(width), int(height)), step) for width, height in different]
    sizes = sorted(set(found))
    place = {size: index for index, size in enumerate(sizes)}
    bucket = np.array([place[size] for size in found], dtype=np.int64)[of.reshape(-1)]
    return StreamedSamples(source, rows, step, numbers, bucket, tuple(sizes), shapes)


def split_samples(samples: StreamedSamples, split: float | None, seed: int) -> tuple[StreamedSamples, StreamedSamples]:
    """Split rows into those to train on and those to hold out: ``validation.split`` gives their number, the seed
    decides which.

    Raises:
        UserError: none are left.
    """
    count = int(split or 0)
    if count >= len(samples):
        raise UserError(
            f"validation.split: {count} of {plural(len(samples), 'row')} leaves none to train on. Use a smaller number"
        )
    order = stream(seed, "held-out-rows").permutation(len(samples))[:count]
    return samples.take(np.delete(np.arange(len(samples)), order)), samples.take(order)
