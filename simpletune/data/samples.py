"""Elements of a plan: the samples of an epoch, the crops of a picture, and the planned samples of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simpletune.data.sources.augmentation import UNCHANGED, Augmentation
from simpletune.data.sources.source import Hole, RejectedEntry, Source, SourceImage
from simpletune.models.shared.buckets import STEP, Size
from simpletune.system.options import Json


@dataclass(frozen=True)
class Sample:
    """One repetition of a picture in an epoch, with its bucket."""

    image: SourceImage
    bucket: Size
    repeat: int


@dataclass(frozen=True)
class Crop:
    """One crop of a picture: everything its latents depend on, apart from the autoencoder.

    Args:
        offset: position of the crop within the excess width and height, 0 to 1.
        flip: whether it is mirrored left to right.
        augmentation: changes of its colours, and its rotation.
        hole: what an inpainting model paints; None: the model does not inpaint.
    """

    image: SourceImage
    bucket: Size
    offset: tuple[float, float]
    flip: bool
    augmentation: Augmentation = UNCHANGED
    hole: Hole | None = None

    @property
    def without_hole(self) -> Crop:
        """The crop alone. A mask that is the hole does not weigh its loss."""
        if self.hole is None:
            return self
        image = replace(self.image, mask=None) if self.hole.kind == "own" else self.image
        return replace(self, image=image, hole=None)

    @property
    def cached(self) -> tuple[Crop, ...]:
        """The crops whose latents a cache keeps: without the hole, which holes share, and with it."""
        return (self,) if self.hole is None else (self.without_hole, self)


@dataclass(frozen=True)
class PlannedSample:
    """One sample as planned for a micro-batch.

    Args:
        view: the picture and its crop.
        caption: the prompt; empty if dropped.
        level: the noise level after the shift: sigma in (0, 1) for flow, the timestep for diffusion.
        noise_key: the parts of the key that seeds the noise.
        weight: 1 for a sample of the epoch; 0 for a filler, which pads the micro-batch and is excluded from the loss.
        loss_weight: factor of the loss, set by the source.
    """

    view: Crop
    caption: str
    level: float
    noise_key: tuple[int | str, ...]
    weight: int = 1
    loss_weight: float = 1.0


def drop_rejected(images: Sequence[SourceImage], rejected: Sequence[RejectedEntry]) -> list[SourceImage]:
    bad = {(each.source, each.name) for each in rejected}
    return [image for image in images if (image.source, image.name) not in bad]


def make_samples(
    images: Sequence[SourceImage], sources: Sequence[Source], repeats: int | None = None, step: int = STEP
) -> list[Sample]:
    """List the samples of an epoch, sorted by source and picture name, a picture's repetitions next to each other.
    ``repeats`` overrides the sources'; sides of buckets are multiples of ``step`` pixels."""
    samples = []
    for image in sorted(images, key=lambda image: (image.source, image.name)):
        source = sources[image.source]
        bucket, count = source.bucket(image.size, step), repeats or source.repeats * image.repeats
        samples += [Sample(image, bucket, repeat) for repeat in range(count)]
    return samples


def samples_by_bucket(manifest: Sequence[Json]) -> Counter[str]:
    """Count the samples that may share a micro-batch in an epoch, by bucket and length, from a plan's manifest; a
    stream's manifest lists them in its first line."""
    if manifest and "buckets" in manifest[0]:
        return Counter(manifest[0]["buckets"])
    trained = (row for row in manifest if not row.get("held_out"))
    return Counter("x".join(map(str, (*row["bucket"], row.get("tokens", "")))) for row in trained)


def images_in(manifest: Sequence[Json]) -> int:
    """Count the pictures that are trained on from a plan's manifest."""
    if manifest and "buckets" in manifest[0]:
        return samples_by_bucket(manifest).total()
    return len({row["file"] for row in manifest if not row.get("held_out")})
