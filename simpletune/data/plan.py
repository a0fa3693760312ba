"""The run's plan: the samples, captions, noise levels and noise of each step, as a function of the seed and the step.

tests/reference/README.md describes the keys and the order, and re-implements them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from simpletune.data.concept import Concept
from simpletune.data.prompts import prompt_of
from simpletune.data.row_order import deal_batches
from simpletune.data.samples import Crop, PlannedSample, Sample
from simpletune.data.source_mix import SourceShare
from simpletune.data.sources.augmentation import draw_augmentation
from simpletune.data.sources.holes import draw_hole
from simpletune.data.sources.multi_source import MultiSource
from simpletune.data.sources.source import Source
from simpletune.models.objectives import Objective
from simpletune.models.shared.buckets import Size
from simpletune.system.options import Json
from simpletune.system.rng import stream


@dataclass(frozen=True)
class GlobalBatch:
    """The largest number of samples in one optimizer step."""

    batch_size: int  # samples in a micro-batch
    accumulation: int = 1  # micro-batches in a step, over all processes


def steps_in_epoch(buckets: Iterable[int], batch: GlobalBatch) -> int:
    """Return an epoch's steps from the number of samples in each bucket: its micro-batches by those of a step, rounded
    up."""
    micros = sum(math.ceil(members / batch.batch_size) for members in buckets)
    return math.ceil(micros / batch.accumulation)


class Plan:
    """Selects the samples of each micro-batch of a run.

    Args:
        samples: the samples of an epoch (``make_samples``).
        data: provides crop, flip, augmentation, variants, captions and loss weight of each source.
        objective: provides the density of noise levels.
        seed: ``train.seed``.
        batch: the batch sizes of a step.
        held_out: samples that no step trains on; if there are any, the evaluation uses them.
        inpaints: whether crops have holes, for a model that inpaints.
        lengths: returns the numbers of tokens of prompts, for a model whose micro-batches are to have prompts of one
            length each; their captions are then dropped together.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        data: Source | MultiSource | Concept,
        objective: Objective,
        seed: int,
        batch: GlobalBatch,
        held_out: Sequence[Sample] = (),
        inpaints: bool = False,
        lengths: Callable[[Sequence[str]], Sequence[int]] | None = None,
    ):
        if not samples:
            raise ValueError("a plan needs at least one sample")
        self.samples = samples
        self.held_out = held_out
        self.data = data
        self.sources = data.members
        self.objective = objective
        self.seed = seed
        self.inpaints, self.lengths = inpaints, lengths
        self.batch_size = batch.batch_size
        self.accumulation = batch.accumulation
        self.shifts = [objective.shift_at(source.resolution) for source in self.sources]
        self.buckets = self._group_by_bucket()
        self.tokens = self._longest_prompts()
        self.dealt = self._group_by_length()
        """The samples that may share a micro-batch, by their bucket and, with ``lengths``, their prompts' tokens."""
        self._micros = sum(math.ceil(len(members) / self.batch_size) for members in self.dealt.values())
        self.steps_per_epoch = steps_in_epoch(map(len, self.dealt.values()), batch)
        """Optimizer steps in an epoch."""
        self._epoch = lru_cache(maxsize=2)(self._order_of_epoch)

    def _group_by_bucket(self) -> Mapping[Size, Sequence[int]]:
        """Group the samples by bucket."""
        found: dict[Size, list[int]] = defaultdict(list)
        for index, sample in enumerate(self.samples):
            found[sample.bucket].append(index)
        return found

    def _longest_prompts(self) -> Sequence[int] | None:
        """Return the tokens of each sample's longest prompt: its variants may differ, but an epoch's steps must not."""
        if self.lengths is None:
            return None
        prompts = [
            [self.prompt(sample, variant) for variant in range(self.source_of(sample).variants)]
            for sample in self.samples
        ]
        distinct = list(dict.fromkeys(prompt for each in prompts for prompt in each))
        known = dict(zip(distinct, self.lengths(distinct), strict=True))
        return [max(known[prompt] for prompt in each) for each in prompts]

    def _group_by_length(self) -> Mapping[tuple[int, ...], Sequence[int]]:
        if self.tokens is None:
            return {(*size,): members for size, members in self.buckets.items()}
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for size, members in self.buckets.items():
            for index in members:
                found[*size, self.tokens[index]].append(index)
        return found

    @property
    def samples_per_step(self) -> float:
        """Mean number of samples in a step."""
        return len(self.samples) / self.steps_per_epoch

    @property
    def fillers(self) -> int:
        """Padding rows in an epoch's micro-batches."""
        return self._micros * self.batch_size - len(self.samples)

    def with_batch(self, batch: GlobalBatch) -> Plan:
        """Return a plan of the same samples with steps of another size."""
        return Plan(
            self.samples, self.data, self.objective, self.seed, batch, self.held_out, self.inpaints, self.lengths
        )

    def one_of_each_size(self) -> list[list[PlannedSample]]:
        """Return a micro-batch of each bucket, those with the most pixels first, to try out their memory, with its
        longest prompts."""
        found = []
        longest = {key[:2]: members for key, members in sorted(self.dealt.items())}
        for _, members in sorted(longest.items(), key=lambda item: -math.prod(item[0])):
            rows = [members[row % len(members)] for row in range(self.batch_size)]
            found.append([self._draw(self.samples[index], 0, (0, 0, row)) for row, index in enumerate(rows)])
        return found

    def sizes(self) -> list[Size]:
        """Return the size of every bucket, including those of held-out pictures."""
        return list(dict.fromkeys([*self.buckets, *(sample.bucket for sample in self.held_out)]))

    def largest(self) -> Size:
        """Return the size of the bucket with the most pixels."""
        return max(self.sizes(), key=lambda size: size[0] * size[1])

    def _order_of_epoch(self, number: int) -> np.ndarray:
        """Return one epoch as sample indices, -1 where a micro-batch is short: int64 [micro-batches, batch_size]."""
        buckets = []
        for key, members in sorted(self.dealt.items()):
            order = stream(self.seed, "bucket-order", number, *key).permutation(len(members))
            buckets.append(deal_batches(np.array(members)[order], self.batch_size))
        batches = np.concatenate(buckets)
        return batches[stream(self.seed, "pass-order", number).permutation(len(batches))]

    def _rows(self, step: int) -> np.ndarray:
        """Return a step's micro-batches as rows of its epoch's order: ``accumulation``, or fewer at the end of an
        epoch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[within * self.accumulation : (within + 1) * self.accumulation]

    def micros(self, step: int) -> Sequence[Sequence[int]]:
        """Return the samples of each micro-batch of a step, by index; never none."""
        return [row[row >= 0].tolist() for row in self._rows(step)]

    def areas(self, step: int) -> list[int]:
        """Return the pixels per picture of each micro-batch of a step, which determine its cost."""
        return [math.prod(self._bucket_of(members[0])) for members in self.micros(step)]

    def _bucket_of(self, index: int) -> Size:
        """Return the bucket of a sample."""
        return self.samples[index].bucket

    def micro_batch(self, step: int, micro: int) -> list[PlannedSample]:
        """Return the ``batch_size`` samples of one micro-batch of a step, all from one bucket, with fillers last, which
        repeat the micro-batch's own samples. Beyond a step's last micro-batch, all are fillers that repeat it."""
        rows = self._rows(step)
        place = min(micro, len(rows) - 1)
        members = rows[place][rows[place] >= 0].tolist()  # of this row alone: a step may have hundreds
        first, epoch = (step * self.accumulation + place) * self.batch_size, step // self.steps_per_epoch
        draws = [
            self._draw(self.samples[index], epoch, (step, place, first + row), first if self.lengths else None)
            for row, index in enumerate(members)
        ]
        real = len(draws) if place == micro else 0
        filled = [draws[row % len(draws)] for row in range(self.batch_size)]
        return filled[:real] + [replace(draw, weight=0) for draw in filled[real:]]

    def source_of(self, sample: Sample) -> Source:
        """Return the source of a sample's picture."""
        return self.sources[sample.image.source]

    def _draw(
        self, sample: Sample, epoch: int, key: tuple[int, int, int], together: int | None = None
    ) -> PlannedSample:
        """Draw a sample's random numbers; the key is its step, micro-batch and place among all samples of the run.
        Captions that are dropped ``together`` share the place of their micro-batch's first sample."""
        source, place = self.source_of(sample), key[2] if together is None else together
        dropped = (
            source.caption_dropout and stream(self.seed, "dropout", *key[:2], place).random() < source.caption_dropout
        )
        repeats = source.repeats * sample.image.repeats  # in an epoch
        variant = (epoch * repeats + sample.repeat) % source.variants
        return PlannedSample(
            view=self.view(sample, variant),
            caption="" if dropped else self.prompt(sample, variant),
            level=self.objective.draw(stream(self.seed, "sigma", *key), self.shifts[sample.image.source]),
            noise_key=("noise", *key),
            loss_weight=source.weight,
        )

    def view(self, sample: Sample, variant: int) -> Crop:
        """Return one of a sample's crops, which depends on the picture's bytes, not on its name or position."""
        source = self.source_of(sample)
        augmentation = draw_augmentation(source, self.seed, sample.image.digest, variant)
        hole = draw_hole(source, self.seed, sample.image.digest, variant) if self.inpaints else None
        if source.crop != "random" and not source.flip:
            return Crop(sample.image, sample.bucket, (0.5, 0.5), False, augmentation, hole)
        draw = stream(self.seed, "view", sample.image.digest, variant)
        offset = draw.random(), draw.random()  # drawn for a centred crop, too: the flip is the third number
        if source.crop != "random":
            offset = 0.5, 0.5
        return Crop(sample.image, sample.bucket, offset, source.flip and draw.random() < 0.5, augmentation, hole)

    def prompt(self, sample: Sample, variant: int) -> str:
        """Return the prompt of one variant of a sample."""
        return prompt_of(sample.image, self.source_of(sample), self.seed, variant)

    def views(self) -> list[Crop]:
        """Return the distinct crops that the run may need: of the samples in order, then of the held-out ones."""
        found = [self.view(sample, n) for sample in self.samples for n in range(self.source_of(sample).variants)]
        return list(dict.fromkeys([*found, *(self.view(sample, 0) for sample in self.held_out)]))

    def captions(self) -> list[str]:
        """Return the distinct prompts that the run may need: of the samples in order, then of the held-out ones."""
        found = [self.prompt(sample, n) for sample in self.samples for n in range(self.source_of(sample).variants)]
        found += [self.prompt(sample, 0) for sample in self.held_out]
        dropped = any(source.caption_dropout for source in self.sources)
        return list(dict.fromkeys([*found, ""] if dropped else found))

    def images(self) -> int:
        """Count the different pictures that are trained on."""
        return len({(self.source_of(sample).path, sample.image.name) for sample in self.samples})

    def share(self, index: int, path: str) -> SourceShare:
        """Describe the contribution of one source to an epoch, with the path to display."""
        source = self.sources[index]
        samples = [sample for sample in self.samples if sample.image.source == index]
        held_out = [sample for sample in self.held_out if sample.image.source == index]
        firsts = [sample for sample in samples if not sample.repeat]
        counts = sorted({source.repeats * sample.image.repeats for sample in firsts}) or [0]
        pairs = [(sample, variant) for sample in firsts for variant in range(source.variants)]
        pairs += [(sample, 0) for sample in held_out]
        return SourceShare(
            path=path,
            images=len(firsts),
            passes=str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}",
            samples=len(samples),
            held_out=len(held_out),
            prompts=len({self.prompt(*pair) for pair in pairs}),
            crops=len({self.view(*pair).without_hole for pair in pairs}),
            holes=len({view for pair in pairs if (view := self.view(*pair)).hole is not None}),
            masks=sum(sample.image.mask is not None for sample in firsts),
            weight=source.weight,
            regularization=source.regularization,
            shape=f"{source.resolution} px in {source.aspect}",
        )

    def shares(self, names: tuple[str, ...] = ()) -> list[SourceShare]:
        """Describe the contribution of each source, in order; ``names`` are shown instead of the sources' paths."""
        paths = names or tuple(source.path for source in self.sources)
        return [self.share(index, path) for index, path in enumerate(paths)]

    def example(self) -> str:
        """Return the prompt of the first sample that is not for regularization."""
        return self.prompt(self._subjects()[0], 0)

    def _subjects(self) -> Sequence[Sample]:
        """Return the samples that are not for regularization; all of them if there is no other."""
        return [sample for sample in self.samples if not self.source_of(sample).regularization] or self.samples

    def _evaluation_samples(self, count: int) -> list[Sample]:
        """Return the samples of an evaluation: evenly spread, in order."""
        samples = self.held_out or self._subjects()
        few = count < len(samples)
        return [samples[n * len(samples) // count if few else n % len(samples)] for n in range(count)]

    def evaluation(self, count: int) -> list[PlannedSample]:
        """Return the fixed samples of the validation loss, in order, with noise levels at evenly spaced quantiles.

        Uses the held-out samples, or the training samples if none are held out. A fixed permutation pairs noise levels
        with samples, so that the two are not correlated.
        """
        levels = stream(self.seed, "evaluation-levels").permutation(count)
        draws = []
        for index, sample in enumerate(self._evaluation_samples(count)):
            level = self.objective.quantile((levels[index] + 0.5) / count, self.shifts[sample.image.source])
            draws.append(
                PlannedSample(self.view(sample, 0), self.prompt(sample, 0), level, ("evaluation-noise", index))
            )
        return draws

    def manifest(self) -> list[Json]:
        """Return everything that the order of samples and the evaluation depend on; checkpoints pin it."""
        rows = [*map(self._row, self.samples), *({**self._row(sample), "held_out": True} for sample in self.held_out)]
        for row, tokens in zip(rows, self.tokens or (), strict=False):
            row["tokens"] = tokens
        return rows

    def _row(self, sample: Sample) -> Json:
        """Return one line of the manifest. Fields added since the first version appear only where they are used, so
        that manifests of older checkpoints still compare equal."""
        row: Json = {
            "file": sample.image.name,
            "sha256": sample.image.digest,
            "caption": self.prompt(sample, 0),
            "bucket": list(sample.bucket),
            "repeat": sample.repeat,
        }
        prompts = dict.fromkeys(self.prompt(sample, variant) for variant in range(self.source_of(sample).variants))
        if len(prompts) > 1:
            row["captions"] = list(prompts)
        if sample.image.weights:
            row["weights"] = list(sample.image.weights)
        if sample.image.mask is not None:
            row["mask"] = sample.image.mask.digest
        if sample.image.decoding.changes:
            row["decoding"] = sample.image.decoding.changes
        if self.inpaints:
            row["inpainting_mask"] = self.source_of(sample).inpainting_mask
        if not isinstance(self.data, Source):
            row["source"] = sample.image.source
        return row
