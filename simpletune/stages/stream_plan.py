"""The plan of a run over a data set in shards: the same steps for any number of processes, and no list of samples.

Even for a million rows, a plan holds only arrays of their numbers, blocks and buckets, and the order of two epochs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from simpletune.config.schema import TrainConfig
from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.row_order import epoch_order, substitute_unusable
from simpletune.data.samples import Sample
from simpletune.data.source_mix import SourceShare
from simpletune.data.sources.stream import Stream
from simpletune.models.objectives import Objective
from simpletune.models.shared.buckets import Size
from simpletune.stages.stream_samples import StreamedSamples, split_samples, streamed_samples
from simpletune.system.options import Json, UserError, plural

FIRST = 1024  # the most samples of a run that an evaluation without a split looks at
PROMPT_FIELDS = (
    "prompt", "caption_column", "caption_lines", "caption_prefix", "caption_suffix", "shuffle_tags", "tag_dropout",
    "keep_tags", "tag_separator", "caption_dropout", "variants",
)  # fmt: skip


class StreamPlan(Plan):
    """Selects the samples of each micro-batch of a run over a data set in shards.

    Args:
        samples: the rows to train on.
        objective: provides the density of noise levels.
        seed: ``train.seed``.
        batch: the batch sizes of a step.
        held_out_rows: rows that no step trains on.
        unusable: places of unusable samples, and places in ``held_out_rows``; in an epoch, the next usable row of its
            bucket replaces each.
        inpaints: whether crops have holes, for a model that inpaints.
    """

    samples: StreamedSamples

    def __init__(
        self,
        samples: StreamedSamples,
        objective: Objective,
        seed: int,
        batch: GlobalBatch,
        held_out_rows: StreamedSamples,
        unusable: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, np.int64)),
        inpaints: bool = False,
    ):
        self.held_out_rows, self.unusable = held_out_rows, unusable
        held_out = held_out_rows.take(self.usable_held_out())
        super().__init__(samples, samples.source, objective, seed, batch, held_out, inpaints)

    def usable_held_out(self) -> np.ndarray:
        """Return the places in ``held_out_rows`` of rows that are usable as far as is known."""
        return np.setdiff1d(np.arange(len(self.held_out_rows)), self.unusable[1])

    def with_batch(self, batch: GlobalBatch) -> StreamPlan:
        """Return a plan of the same samples with steps of another size."""
        return StreamPlan(
            self.samples, self.objective, self.seed, batch, self.held_out_rows, self.unusable, self.inpaints
        )

    def without(self, trained: Sequence[int], held_out: Sequence[int]) -> StreamPlan:
        """Return the plan without some unusable rows.

        Args:
            trained: places of samples.
            held_out: places in ``held_out_rows``.

        Raises:
            UserError: no row of a bucket is left.
        """
        more = [np.array(each, dtype=np.int64) for each in (trained, held_out)]
        first, second = (np.union1d(old, new) for old, new in zip(self.unusable, more, strict=True))
        gone = np.bincount(self.samples.bucket[first], minlength=len(self.samples.sizes))
        for size, bad in zip(self.samples.sizes, gone.tolist(), strict=True):
            if bad and bad == len(self.buckets[size]):
                raise UserError(
                    f"data.path: none of the {plural(bad, 'row')} of {size[0]}x{size[1]} px can be used. Remove them"
                )
        if len(second) and len(second) == len(self.held_out_rows):
            raise UserError(
                f"validation.split: none of the {plural(len(second), 'row')} held out can be used. Use more"
            )
        batch = GlobalBatch(self.batch_size, self.accumulation)
        return StreamPlan(
            self.samples, self.objective, self.seed, batch, self.held_out_rows, (first, second), self.inpaints
        )

    def _group_by_bucket(self) -> Mapping[Size, Sequence[int]]:
        found = {size: np.flatnonzero(self.samples.bucket == place) for place, size in enumerate(self.samples.sizes)}
        return {size: members for size, members in found.items() if len(members)}  # type: ignore[misc]

    def _order_of_epoch(self, number: int) -> np.ndarray:
        block = self.samples.rows.blocks_of(self.samples.numbers)
        window = self.samples.source.shuffle_window
        batches = epoch_order((self.seed, number), block, self.samples.bucket, window, self.batch_size)
        if len(self.unusable[0]):
            batches = substitute_unusable(batches, self.samples.bucket, self.unusable[0])
        return batches

    def _bucket_of(self, index: int) -> Size:
        return self.samples.sizes[self.samples.bucket[index]]

    def used_variants(self, start: int, steps: int) -> np.ndarray:
        """Return the distinct pairs of sample and variant that the steps from ``start`` up to ``steps`` train on.

        Returns:
            place * data.variants + variant, ascending, which is the order of the shards: int64 [n].
        """
        variants, found = self.samples.source.variants, [np.empty(0, np.int64)]
        for epoch in range(start // self.steps_per_epoch, -(-steps // self.steps_per_epoch)):
            first, end = (max(0, step - epoch * self.steps_per_epoch) * self.accumulation for step in (start, steps))
            micros = self._epoch(epoch)[first:end]
            found.append(micros[micros >= 0] * variants + epoch % variants)
            if len(found) > variants + 2:  # whole epochs have shown every sample in every variant
                break
        return np.unique(np.concatenate(found))

    def first_places(self, count: int) -> np.ndarray:
        """Return the places of the first samples of the run: int64 [count or fewer]."""
        flat = self._epoch(0).reshape(-1)
        return flat[flat >= 0][:count]

    def _subjects(self) -> StreamedSamples:
        return self.samples.take(self.first_places(FIRST))

    def _evaluation_samples(self, count: int) -> list[Sample]:
        """Return the samples of an evaluation: the first held-out ones, or the first of the run."""
        samples = self.held_out or self._subjects()
        return [samples[number % len(samples)] for number in range(count)]

    def images(self) -> int:
        """Count the rows that are trained on."""
        return len(self.samples)

    def share(self, index: int, path: str) -> SourceShare:
        """Describe what the data set contributes to an epoch, without counting prompts and crops, which takes reading
        all rows."""
        source = self.samples.source
        return SourceShare(
            path=path,
            images=len(self.samples),
            passes="1",
            samples=len(self.samples),
            held_out=len(self.held_out),
            prompts=None,
            crops=None,
            holes=None if self.inpaints else 0,
            masks=len(self.samples) if source.mask else 0,
            weight=source.weight,
            regularization=source.regularization,
            shape=f"{source.resolution} px in {source.aspect}",
        )

    def manifest(self) -> list[Json]:
        """Return what the order of samples depends on: a line about all rows, and one for each shard."""
        source, samples = self.samples.source, self.samples
        shapes = b"" if samples.shapes is None else samples.bucket.tobytes()
        first: Json = {
            "file": "all rows",
            "repeat": 0,
            "caption": self.example(),
            "buckets": {f"{width}x{height}": len(members) for (width, height), members in self.buckets.items()},
            "bucket_of_rows": hashlib.sha256(shapes).hexdigest(),
            "held_out_rows": len(self.held_out_rows),
            "shuffle_window": source.shuffle_window,
            **({"inpainting_mask": source.inpainting_mask} if self.inpaints else {}),
            **({} if source.background == "white" else {"decoding": f"on {source.background}"}),
            "prompts": {name: getattr(source, name) for name in PROMPT_FIELDS},
        }
        shards = [
            {"file": shard.name, "repeat": 0, "rows": shard.rows, "sha256": shard.digest}
            for shard in samples.rows.shards
        ]
        return [first, *shards]


def stream_plan(config: TrainConfig) -> StreamPlan:
    """Open the data set and plan a run over it, without reading a row; ``demo:`` names must be resolved.

    Raises:
        UserError: the data set is missing or damaged, or no rows are left to train on.
    """
    assert isinstance(config.pictures, Stream)
    every = streamed_samples(
        config.pictures, config.model.architecture.multiple, config.output.cache_folder / "streams"
    )
    training, held_out = split_samples(every, config.validation.split, config.train.seed)
    batch = GlobalBatch(config.train.micro_batch, config.train.accumulation)
    return StreamPlan(training, config.objective, config.train.seed, batch, held_out, inpaints=config.model.inpaints)
