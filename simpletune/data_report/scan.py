"""The look itself: scan, decode, compare, count. Memory holds one picture a thread, and small tiles of those shown."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from simpletune.config.schema import TrainConfig
from simpletune.data.pictures import cut, decode
from simpletune.data.plan import Plan, View, make_plan, too_small, without
from simpletune.data.source import Picture, Rejected, UnusablePicture
from simpletune.data_report.near_duplicates import PictureHash, hash_of, near_duplicates
from simpletune.data_report.token_counts import LIMIT, token_counts
from simpletune.models.buckets import Size, covering_size, upscaling
from simpletune.system.console import progress

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 2
LARGE = 2**25  # pixels of a picture that only one thread decodes: 128 MiB, and as much for a copy
TILE = 144  # pixels of a tile's longer side
LONG = 300  # characters that stand for 77 tokens where no tokenizer is at hand


@dataclass(frozen=True)
class ScannedImage:
    """A usable picture.

    Args:
        picture: as it was found.
        bucket: the size it is cut to.
        hash: what it is compared by.
        tile: what training sees of it, small; None: it is not among those shown.
    """

    picture: Picture
    bucket: Size
    hash: PictureHash
    tile: Image.Image | None = None

    @property
    def upscale(self) -> float:
        """How much it is scaled up; 1 or less: not at all."""
        return upscaling(self.picture.size, self.bucket)

    @property
    def lost(self) -> float:
        """Share of its pixels that its bucket cuts away."""
        width, height = covering_size(self.picture.size, self.bucket)
        return 1 - self.bucket[0] * self.bucket[1] / (width * height)


@dataclass(frozen=True)
class BucketRow:
    """A bucket: its pictures, its samples and batches in an epoch, and the rows without weight in the last batch."""

    size: Size
    pictures: int
    samples: int
    batches: int
    fillers: int
    lost: float


@dataclass
class DatasetReport:
    """What was found.

    Args:
        path: as the configuration names it.
        captions: where captions came from, in words.
        usable: in the order of their names.
        rejected: what is not, with the reasons.
        left_alone: pictures of other formats by ending.
        exact: names of pictures with the same bytes, by group.
        near: names of pictures that are nearly the same, by group.
        same_caption: names by caption, where several have it and it is not one prompt for all.
        long: captions that CLIP cuts: name, length.
        tokens: whether lengths are tokens; if not, characters.
        buckets: largest first.
        steps: an epoch's.
        batch: pictures a step.
        on_error: what training would do about those rejected.
        hints: what may be meant otherwise than it is taken.
        held_out: names of the pictures that validation.split holds out; buckets and epochs are without them.
    """

    path: str
    captions: str
    usable: list[ScannedImage]
    rejected: list[Rejected]
    left_alone: dict[str, int]
    exact: list[list[str]] = field(default_factory=list)
    near: list[list[str]] = field(default_factory=list)
    same_caption: dict[str, list[str]] = field(default_factory=dict)
    long: list[tuple[str, int]] = field(default_factory=list)
    tokens: bool = False
    buckets: list[BucketRow] = field(default_factory=list)
    steps: int = 0
    batch: int = 1
    resolution: int = 0
    on_error: str = "stop"
    hints: tuple[str, ...] = ()
    held_out: list[str] = field(default_factory=list)

    @property
    def across(self) -> list[list[str]]:
        """Groups of nearly the same pictures of which some are held out and some are trained on."""
        held = set(self.held_out)
        return [group for group in self.near if 0 < len(held.intersection(group)) < len(group)]

    @property
    def small(self) -> list[ScannedImage]:
        """Pictures that are scaled up, the smallest first."""
        return sorted((seen for seen in self.usable if seen.upscale > 1), key=lambda seen: -seen.upscale)

    @property
    def uncaptioned(self) -> list[Rejected]:
        """What is left out for its caption."""
        return [each for each in self.rejected if "caption" in each.reason or "text in" in each.reason]


def scan_dataset(config: TrainConfig, shown: int, name: str = "") -> DatasetReport:
    """Look at a data set.

    Args:
        config: with the data's folder resolved.
        shown: of how many pictures tiles are made.
        name: what the data is called, if not by its folder.

    Raises:
        UserError: the data cannot be scanned at all.
    """
    scan = config.data.scan(Path(config.data.path))
    small = too_small(scan.pictures, config.data)
    pictures = without(scan.pictures, small)
    found = DatasetReport(name or config.data.path, scan.captions, [], [*scan.rejected, *small], dict(scan.left_alone))
    found.on_error, found.resolution, found.hints = config.data.on_error, config.data.resolution, scan.hints
    if not pictures:
        return found
    plan = make_plan(config, pictures, 1)
    samples = sorted([*plan.samples, *plan.held_out], key=lambda sample: sample.picture.name)
    firsts = {sample.picture.name: plan.view(sample, 0) for sample in samples if sample.repeat == 0}
    trained = [firsts[sample.picture.name] for sample in plan.samples if sample.repeat == 0]
    ordered = sorted(trained, key=lambda view: (view.bucket, view.picture.name))
    chosen = {ordered[place].picture.name for place in evenly_spaced(len(ordered), shown)}
    with progress("look", len(firsts), "pictures") as advance:
        for result in _scan_pictures(firsts.values(), chosen, advance):
            (found.usable if isinstance(result, ScannedImage) else found.rejected).append(result)  # type: ignore[arg-type]
    if found.usable:
        _compare(found)
        _read_captions(found, config)
        _count(found, make_plan(config, [seen.picture for seen in found.usable], 1))
    return found


def evenly_spaced(count: int, room: int) -> list[int]:
    """At most so many of the places 0 to count - 1, evenly spread."""
    return sorted({place * count // min(room, count) for place in range(min(room, count))}) if room else []


def _scan_pictures(
    views: Iterable[View], tiles: Collection[str], advance: Callable[[], None]
) -> Iterator[ScannedImage | Rejected]:
    """Decode pictures in several threads, large ones in one: each thread keeps the memory of its largest."""
    with ThreadPoolExecutor(THREADS) as small, ThreadPoolExecutor(1) as large:
        futures = deque(
            (large if view.picture.size[0] * view.picture.size[1] > LARGE else small).submit(
                _scan_picture, view, view.picture.name in tiles, advance
            )
            for view in views
        )
        while futures:
            yield futures.popleft().result()


def _scan_picture(view: View, tile: bool, advance: Callable[[], None]) -> ScannedImage | Rejected:
    """Decode one picture; a JPEG no larger than a tile needs."""
    try:
        image = decode(view.picture.read_same(), at_least=2 * TILE)
    except UnusablePicture as reason:
        return Rejected(view.picture.name, str(reason))
    finally:
        advance()
    return ScannedImage(view.picture, view.bucket, hash_of(image), _tile(image, view) if tile else None)


def _tile(image: Image.Image, view: View) -> Image.Image:
    """The cut that training sees, small."""
    scale = TILE / max(view.bucket)
    size = (max(1, round(view.bucket[0] * scale)), max(1, round(view.bucket[1] * scale)))
    pixels = cut(image, size, view.offset, view.flip)
    return Image.fromarray(((pixels.transpose(1, 2, 0) + 1) * 127.5).round().astype(np.uint8))


def _compare(found: DatasetReport) -> None:
    by_digest = defaultdict(list)
    for seen in found.usable:
        by_digest[seen.picture.digest].append(seen)
    found.exact = [[seen.picture.name for seen in group] for group in by_digest.values() if len(group) > 1]
    firsts = [group[0] for group in by_digest.values()]
    groups = near_duplicates([seen.hash for seen in firsts])
    found.near = [[firsts[place].picture.name for place in group] for group in groups]


def _read_captions(found: DatasetReport, config: TrainConfig) -> None:
    names = defaultdict(list)
    for seen in found.usable:
        names[seen.picture.caption].append(seen.picture.name)
    if config.data.prompt is None:
        found.same_caption = {caption: group for caption, group in names.items() if len(group) > 1}
    counts = token_counts(config, list(names))
    found.tokens = counts is not None
    limit = LIMIT if found.tokens else LONG
    lengths = dict(zip(names, counts or map(len, names), strict=True))
    found.long = [
        (seen.picture.name, lengths[seen.picture.caption])
        for seen in found.usable
        if lengths[seen.picture.caption] > limit
    ]


def _count(found: DatasetReport, plan: Plan) -> None:
    lost: dict[Size, list[float]] = defaultdict(list)
    found.held_out = [sample.picture.name for sample in plan.held_out]
    held = set(found.held_out)
    for seen in found.usable:
        if seen.picture.name not in held:
            lost[seen.bucket].append(seen.lost)
    for size, members in plan.buckets.items():
        batches = -(-len(members) // plan.batch_size)
        shares: Sequence[float] = lost[size]
        row = BucketRow(
            size=size,
            pictures=len(shares),
            samples=len(members),
            batches=batches,
            fillers=batches * plan.batch_size - len(members),
            lost=sum(shares) / len(shares),
        )
        found.buckets.append(row)
    found.buckets.sort(key=lambda row: (-row.samples, row.size))
    found.steps = plan.steps_per_epoch
    found.batch = plan.batch_size * plan.accumulation
