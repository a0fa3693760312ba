"""The run's plan: the samples, captions, noise levels and noise of each step, as a function of the seed and the step.

docs/reproducibility.md describes the keys and the order; tests/reference re-implements them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from simpletune.data.source import Picture, Rejected, Source
from simpletune.data.split import split_pictures
from simpletune.models.buckets import STEP, Size, nearest_bucket, upscaling
from simpletune.objectives import Objective
from simpletune.options import Json, UserError
from simpletune.system.rng import stream

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


@dataclass(frozen=True)
class Sample:
    """One repetition of a picture in an epoch, with its bucket."""

    picture: Picture
    bucket: Size
    repeat: int


@dataclass(frozen=True)
class View:
    """One crop of a picture: everything its latents depend on, apart from the autoencoder.

    Args:
        offset: position of the crop within the excess width and height, 0 to 1.
        flip: whether it is mirrored left to right.
    """

    picture: Picture
    bucket: Size
    offset: tuple[float, float]
    flip: bool


@dataclass(frozen=True)
class Draw:
    """One presentation of a sample in a micro-batch.

    Args:
        view: the picture and its crop.
        caption: the prompt; empty if dropped.
        level: the noise level, after the shift: sigma in (0, 1) of a flow, the timestep of a diffusion.
        noise_key: the parts of the key that seeds the noise.
        weight: 1 for a sample of the epoch; 0 for a filler, which pads the micro-batch and is excluded from the loss.
    """

    view: View
    caption: str
    level: float
    noise_key: tuple[int | str, ...]
    weight: int = 1


def bucket_of(picture: Picture, source: Source, step: int = STEP) -> Size:
    """The size in pixels that a picture is cropped to, in multiples of ``step``."""
    if source.aspect == "square":
        return source.resolution, source.resolution
    return nearest_bucket(picture.size, source.resolution, source.max_aspect, step)


def too_small(pictures: Sequence[Picture], source: Source, step: int = STEP) -> list[Rejected]:
    """Reject pictures that would have to be scaled up by more than ``data.max_upscale``.

    Args:
        step: sides of buckets are multiples of this, in pixels.
    """
    rejected = []
    for picture in pictures if source.max_upscale is not None else ():
        scale = upscaling(picture.size, bucket_of(picture, source, step))
        if scale > source.max_upscale:  # type: ignore[operator]
            size = f"{picture.size[0]}x{picture.size[1]}"
            limit = f"the limit is data.max_upscale={source.max_upscale:g}"
            rejected.append(
                Rejected(picture.name, f"is too small: {size} would be scaled up {scale:.1f} times; {limit}")
            )
    return rejected


def without(pictures: Sequence[Picture], rejected: Sequence[Rejected]) -> list[Picture]:
    """The pictures that were not rejected."""
    bad = {each.name for each in rejected}
    return [picture for picture in pictures if picture.name not in bad]


def make_samples(
    pictures: Sequence[Picture], source: Source, repeats: int | None = None, step: int = STEP
) -> list[Sample]:
    """The samples of an epoch, sorted by picture name, with a picture's repetitions next to each other.

    Args:
        pictures: the pictures to sample.
        source: gives aspect, resolution and repeats.
        repeats: overrides the source's repeats.
        step: sides of buckets are multiples of this, in pixels.
    """
    samples, repeats = [], source.repeats if repeats is None else repeats
    for picture in sorted(pictures, key=lambda picture: picture.name):
        bucket = bucket_of(picture, source, step)
        samples += [Sample(picture, bucket, repeat) for repeat in range(repeats)]
    return samples


def make_plan(config: TrainConfig, pictures: Sequence[Picture], processes: int) -> Plan:
    """Plan a run over the usable pictures, without those that ``validation.split`` holds out.

    Raises:
        UserError: there are no pictures, or none on one side of the split.
    """
    if not pictures:
        raise UserError(f"data.path: {config.data.path} contains no usable pictures. Add some")
    training, held_out = split_pictures(pictures, config.validation.split)
    return Plan(
        make_samples(training, config.data, step=config.model.multiple),
        config.data,
        config.objective,
        config.train.seed,
        GlobalBatch(config.train.batch_size, config.train.gradient_accumulation, processes),
        make_samples(held_out, config.data, 1, config.model.multiple),
    )


@dataclass(frozen=True)
class GlobalBatch:
    """The largest number of samples in one optimizer step.

    Args:
        batch_size: samples in a micro-batch.
        accumulation: micro-batches in a step, on each process.
        processes: number of processes.
    """

    batch_size: int
    accumulation: int = 1
    processes: int = 1


def steps_in_epoch(buckets: Iterable[int], batch: GlobalBatch) -> int:
    """Steps in an epoch: the micro-batches of the epoch divided by those of a step, rounded up.

    Args:
        buckets: the number of samples in each bucket.
        batch: the batch sizes of a step.
    """
    micros = sum(math.ceil(members / batch.batch_size) for members in buckets)
    return math.ceil(micros / (batch.accumulation * batch.processes))


class Plan:
    """Selects the draws of each micro-batch of a run.

    Args:
        samples: the samples of an epoch (``make_samples``).
        source: gives crop, flip, variants and caption dropout.
        objective: gives the density of noise levels.
        seed: ``train.seed``.
        batch: the batch sizes of a step.
        held_out: samples that no step trains on; if there are any, the evaluation uses them.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        source: Source,
        objective: Objective,
        seed: int,
        batch: GlobalBatch,
        held_out: Sequence[Sample] = (),
    ):
        if not samples:
            raise ValueError("a plan needs at least one sample")
        self.samples, self.source, self.objective = list(samples), source, objective
        self.held_out, self.seed = list(held_out), seed
        self.batch_size, self.accumulation, self.processes = batch.batch_size, batch.accumulation, batch.processes
        self.shift = objective.shift_at(source.resolution)
        self.buckets: dict[Size, list[int]] = defaultdict(list)
        for index, sample in enumerate(self.samples):
            self.buckets[sample.bucket].append(index)
        self._micros = sum(math.ceil(len(members) / self.batch_size) for members in self.buckets.values())
        self.steps_per_epoch = steps_in_epoch(map(len, self.buckets.values()), batch)
        """Optimizer steps in an epoch."""
        self._epoch = lru_cache(maxsize=2)(self._order_of_epoch)

    @property
    def samples_per_step(self) -> float:
        """Mean number of samples in a step."""
        return len(self.samples) / self.steps_per_epoch

    @property
    def fillers(self) -> int:
        """Padding rows in an epoch's micro-batches."""
        return self._micros * self.batch_size - len(self.samples)

    @property
    def _micros_per_step(self) -> int:
        return self.accumulation * self.processes

    def sizes(self) -> list[Size]:
        """The size of every bucket, including those of held-out pictures."""
        return list(dict.fromkeys([*self.buckets, *(sample.bucket for sample in self.held_out)]))

    def largest(self) -> Size:
        """The size of the bucket with the most pixels."""
        return max(self.sizes(), key=lambda size: size[0] * size[1])

    def _order_of_epoch(self, number: int) -> list[list[int]]:
        """The micro-batches (sample indices) of one epoch; a bucket's last one may be short."""
        batches = []
        for (width, height), members in sorted(self.buckets.items()):
            order = stream(self.seed, "bucket-order", number, width, height).permutation(len(members))
            shuffled = [members[place] for place in order]
            batches += [shuffled[start : start + self.batch_size] for start in range(0, len(members), self.batch_size)]
        return [batches[place] for place in stream(self.seed, "pass-order", number).permutation(len(batches))]

    def _places(self, step: int) -> tuple[int, range]:
        """The epoch of a step, and the range of the epoch's micro-batches that the step trains on; never empty."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self._micros_per_step
        return epoch, range(first, min(first + self._micros_per_step, self._micros))

    def micros(self, step: int) -> int:
        """How many micro-batches of a step contain samples in at least one process; the rest are skipped."""
        return math.ceil(len(self._places(step)[1]) / self.processes)

    def samples_in(self, step: int) -> int:
        """How many samples a step contains over all its micro-batches and processes."""
        epoch, places = self._places(step)
        return sum(len(self._epoch(epoch)[place]) for place in places)

    def micro_batch(self, step: int, micro: int, process: int = 0) -> list[Draw]:
        """The ``batch_size`` draws of one micro-batch, all from one bucket, with fillers last.

        Fillers repeat the micro-batch's own samples; a micro-batch made of fillers alone repeats the step's last one.

        Args:
            step: the optimizer step, counted from 0.
            micro: index of the micro-batch within the step's accumulation.
            process: index of the process.
        """
        epoch, places = self._places(step)
        asked = micro * self.processes + process
        place = min(asked, len(places) - 1)
        number = step * self._micros_per_step + place
        draws = [
            self._draw(self.samples[index], epoch, step, place // self.processes, number * self.batch_size + row)
            for row, index in enumerate(self._epoch(epoch)[places[place]])
        ]
        real = len(draws) if place == asked else 0
        rows = [draws[row % len(draws)] for row in range(self.batch_size)]
        return rows[:real] + [replace(draw, weight=0) for draw in rows[real:]]

    def _draw(self, sample: Sample, epoch: int, step: int, micro: int, index: int) -> Draw:
        key = (step, micro, index)
        dropped = stream(self.seed, "dropout", *key).random() < self.source.caption_dropout
        return Draw(
            view=self.view(sample, (epoch * self.source.repeats + sample.repeat) % self.source.variants),
            caption="" if dropped else sample.picture.caption,
            level=self.objective.draw(stream(self.seed, "sigma", *key), self.shift),
            noise_key=("noise", *key),
        )

    def view(self, sample: Sample, variant: int) -> View:
        """One of a sample's crops. It depends on the picture's bytes, not on its name or position."""
        draw = stream(self.seed, "view", sample.picture.digest, variant)
        offset = (draw.random(), draw.random()) if self.source.crop == "random" else (0.5, 0.5)
        return View(sample.picture, sample.bucket, offset, self.source.flip and draw.random() < 0.5)

    def views(self) -> list[View]:
        """Every distinct crop that the run may need: those of the samples in order, then of the held-out ones."""
        variants = range(self.source.variants)
        trained = [self.view(sample, variant) for sample in self.samples for variant in variants]
        return list(dict.fromkeys([*trained, *(self.view(sample, 0) for sample in self.held_out)]))

    def captions(self) -> list[str]:
        """Every distinct prompt that the run may need: those of the samples in order, then of the held-out ones."""
        captions = [sample.picture.caption for sample in [*self.samples, *self.held_out]]
        return list(dict.fromkeys([*captions, ""] if self.source.caption_dropout else captions))

    def evaluation(self, count: int) -> list[Draw]:
        """A fixed set of draws for the evaluation loss: samples in order, noise levels at evenly spaced quantiles.

        Uses the held-out samples, or the training samples if none are held out. A fixed permutation pairs noise levels
        with samples, so that the two are not correlated.
        """
        levels = stream(self.seed, "evaluation-levels").permutation(count)
        draws, samples = [], self.held_out or self.samples
        for index in range(count):
            sample = samples[index * len(samples) // count if count < len(samples) else index % len(samples)]
            level = self.objective.quantile((levels[index] + 0.5) / count, self.shift)
            draws.append(Draw(self.view(sample, 0), sample.picture.caption, level, ("evaluation-noise", index)))
        return draws

    def manifest(self) -> list[Json]:
        """Everything that the order of samples and the evaluation depend on; checkpoints pin it."""
        return [*map(_row, self.samples), *({**_row(sample), "held_out": True} for sample in self.held_out)]


def _row(sample: Sample) -> Json:
    return {
        "file": sample.picture.name,
        "sha256": sample.picture.digest,
        "caption": sample.picture.caption,
        "bucket": list(sample.bucket),
        "repeat": sample.repeat,
    }
