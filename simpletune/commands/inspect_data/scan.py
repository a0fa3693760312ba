"""Scan a dataset: decode, compare and count. Memory holds one picture per thread and the tiles of shown pictures."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from simpletune.commands.inspect_data.near_duplicates import ImageHash, hash_of, near_duplicates
from simpletune.commands.inspect_data.prompt_cuts import token_counts
from simpletune.commands.inspect_data.thumbnails import grey_hole, tile
from simpletune.config.resolve import known_to_inpaint, resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.data.plan import Plan
from simpletune.data.samples import Crop, drop_rejected
from simpletune.data.source_mix import SourceShare
from simpletune.data.sources.accounts import Accounts
from simpletune.data.sources.augmentation import format_augmentation
from simpletune.data.sources.image_files import decode, has_more_frames
from simpletune.data.sources.multi_source import find_too_small, scan_sources, source_notes, stopping_entries
from simpletune.data.sources.source import RejectedEntry, SourceImage, UnusableImage
from simpletune.models.shared.buckets import Size, covering_size, upscaling
from simpletune.models.text.encoder import TextEncoder
from simpletune.stages.plan_data import make_plan, prompt_lengths
from simpletune.system.console import progress

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 2
LARGE = 2**25  # pixels; a single thread decodes larger pictures: 128 MiB each, and another 128 MiB for a copy
TILE = 144  # pixels of a tile's longer side
AUGMENTED, EACH = 6, 8  # pictures whose variants are shown, and variants of each
LONG = 300  # characters taken to be 77 tokens if no tokenizer is available


@dataclass(frozen=True)
class ScannedImage:
    """A usable picture."""

    image: SourceImage
    bucket: Size
    hash: ImageHash
    tile: Image.Image | None = None  # a thumbnail of the crop that training sees; None if it is not shown
    variants: tuple[Image.Image, ...] = ()  # thumbnails of its variants, of a few augmented pictures
    animated: bool = False  # has more frames or pages than the first, which is used

    @property
    def upscale(self) -> float:
        """The factor by which it is scaled up; at most 1 if it is not."""
        return upscaling(self.image.size, self.bucket)

    @property
    def lost(self) -> float:
        """Fraction of its pixels that the crop to its bucket removes."""
        width, height = covering_size(self.image.size, self.bucket)
        return 1 - self.bucket[0] * self.bucket[1] / (width * height)


@dataclass(frozen=True)
class BucketRow:
    """A bucket: its pictures, its samples and batches in an epoch, and the fillers in its last batch."""

    size: Size
    images: int
    samples: int
    batches: int
    fillers: int
    lost: float


@dataclass
class DatasetReport:
    """The findings about a dataset."""

    path: str  # as in the configuration
    captions: str  # a description of where the captions come from
    usable: list[ScannedImage]  # sorted by name
    rejected: list[RejectedEntry]
    left_alone: dict[str, int]  # pictures of unsupported formats, counted by extension
    exact: list[list[str]] = field(default_factory=list)  # groups of names of identical files
    near: list[list[str]] = field(default_factory=list)  # groups of names of nearly identical pictures
    # names by caption, for captions shared by several pictures; empty with data.prompt
    same_caption: dict[str, list[str]] = field(default_factory=dict)
    long: list[tuple[str, int]] = field(default_factory=list)  # (name, length) of captions that it truncates
    tokens: bool = False  # whether lengths count tokens rather than characters
    reader: TextEncoder | None = None  # the first text encoder, whose tokens are counted
    buckets: list[BucketRow] = field(default_factory=list)  # largest first
    steps: int = 0  # steps in an epoch
    batch: int = 1  # pictures in a step
    resolution: int = 0
    on_error: str = "stop"  # ``data.on_error``
    hints: tuple[str, ...] = ()  # sentences about data that may not be as the user intended
    # names of pictures that validation.split holds out; buckets and epochs exclude them
    held_out: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # sentences that explain how data was interpreted
    sources: list[SourceShare] = field(default_factory=list)
    augmentation: list[str] = field(default_factory=list)  # a description of the ranges of each source that has any
    files: Accounts = field(default_factory=Accounts)  # what each file of the folders is
    holes: list[str] = field(
        default_factory=list
    )  # the sources' ``inpainting_mask``; empty: the model does not inpaint

    @property
    def varied(self) -> list[ScannedImage]:
        """The pictures whose variants are shown."""
        return [seen for seen in self.usable if seen.variants]

    @property
    def split_duplicates(self) -> list[list[str]]:
        """Groups of near-duplicates that the split separates: some held out, some trained on."""
        held = set(self.held_out)
        return [group for group in self.near if 0 < len(held.intersection(group)) < len(group)]

    @property
    def small(self) -> list[ScannedImage]:
        """Pictures that are scaled up, largest factor first."""
        return sorted((seen for seen in self.usable if seen.upscale > 1), key=lambda seen: -seen.upscale)

    @property
    def animated(self) -> list[str]:
        """Names of the pictures of which only the first frame or page is used."""
        return [seen.image.name for seen in self.usable if seen.animated]

    @property
    def uncaptioned(self) -> list[RejectedEntry]:
        """Entries rejected because of their caption."""
        return [each for each in self.rejected if "caption" in each.reason or "text in" in each.reason]


def scan_dataset(config: TrainConfig, shown: int, names: tuple[str, ...] = ()) -> DatasetReport:
    """Scan a dataset; ``shown`` pictures get a tile, and ``names`` stand for the sources' folders."""
    if config.pictures.streamed:  # its split draws from all rows, not only from the examined ones
        config = config.model_copy(update={"validation": config.validation.model_copy(update={"split": None})})
    scan, inpaints = scan_sources(config.pictures), known_to_inpaint(config)
    small = find_too_small(scan.images, config.pictures, config.model.architecture.multiple)
    images = _prefix_names(drop_rejected(scan.images, small), config)
    found = DatasetReport(
        ", ".join(dict.fromkeys(names)) or config.pictures.place,
        scan.captions,
        [],
        [*scan.rejected, *small],
        dict(scan.left_alone),
    )
    found.on_error = "stop" if stopping_entries(config.pictures, found.rejected) else "skip"
    found.resolution, found.hints = config.resolution, scan.hints
    found.files = scan.files
    found.notes = (*scan.notes, *source_notes(config.pictures, scan.images, inpaints))
    if not images:
        return found
    plan = make_plan(config, images, inpaints)
    samples = sorted([*plan.samples, *plan.held_out], key=lambda sample: sample.image.name)
    firsts = {_place(sample.image): plan.view(sample, 0) for sample in samples if sample.repeat == 0}
    trained = [firsts[_place(sample.image)] for sample in plan.samples if sample.repeat == 0]
    ordered = sorted(trained, key=lambda view: (view.bucket, view.image.name))
    chosen = {_place(ordered[place].image) for place in spread_indices(len(ordered), shown)}
    ranges = [format_augmentation(source) if source.variants > 1 else "" for source in plan.sources]
    found.augmentation = [words for words in ranges if words]
    found.holes = sorted({source.inpainting_mask for source in plan.sources}) if plan.inpaints else []
    differ = [bool(words) or (plan.inpaints and s.variants > 1) for words, s in zip(ranges, plan.sources, strict=True)]
    varied = [sample for sample in plan.samples if not sample.repeat and differ[sample.image.source]]
    variants = {
        _place(sample.image): [plan.view(sample, n) for n in range(min(EACH, plan.source_of(sample).variants))]
        for sample in (varied[place] for place in spread_indices(len(varied), min(AUGMENTED, shown)))
    }
    firsts_by_name = {view.image.name for view in firsts.values()}
    place = config.model.autoencoder.downsampling
    with progress("look", len(firsts), "pictures") as advance:
        for result in _scan_images(firsts.values(), chosen, variants, place, advance):
            (found.usable if isinstance(result, ScannedImage) else found.rejected).append(result)  # type: ignore[arg-type]
    seen = {seen.image.name for seen in found.usable}
    broken = [each for each in found.rejected if each.name in firsts_by_name - seen]
    found.files = scan.files.with_class("damaged", ((each.name, each.reason) for each in broken))
    if found.usable:
        _compare(found)
        _read_captions(found, config)
        lengths = prompt_lengths(resolve_model_folder(config), download=False)
        plan = make_plan(config, [seen.image for seen in found.usable], inpaints, lengths)
        _count(found, plan)
        found.sources = plan.shares(names)
    return found


def _prefix_names(images: Sequence[SourceImage], config: TrainConfig) -> list[SourceImage]:
    """Prefix pictures' names with their folder's, to distinguish several sources."""
    paths = [source.path for source in config.sources]
    if len(set(paths)) == 1:
        return list(images)
    folders = Counter(Path(path).name for path in set(paths))
    labels = [path if folders[Path(path).name] > 1 else Path(path).name for path in paths]
    return [replace(image, name=f"{labels[image.source]}/{image.name}") for image in images]


def _place(image: SourceImage) -> tuple[int, str]:
    """Identify a picture by source and name; the same folder may be listed twice."""
    return image.source, image.name


def spread_indices(count: int, room: int) -> list[int]:
    """Return at most ``room`` evenly spaced indices from 0 to count - 1."""
    return sorted({place * count // min(room, count) for place in range(min(room, count))}) if room else []


def _scan_images(
    views: Iterable[Crop],
    tiles: Collection[tuple[int, str]],
    variants: Mapping[tuple[int, str], Sequence[Crop]],
    place: int,
    advance: Callable[[], None],
) -> Iterator[ScannedImage | RejectedEntry]:
    """Decode pictures in several threads, but large ones in one: a thread never returns the memory of its largest."""
    scan = partial(_scan_image, place=place, advance=advance)
    with ThreadPoolExecutor(THREADS) as small, ThreadPoolExecutor(1) as large:
        futures = deque(
            (large if view.image.size[0] * view.image.size[1] > LARGE else small).submit(
                scan, view, _place(view.image) in tiles, variants.get(_place(view.image), ())
            )
            for view in views
        )
        while futures:
            yield futures.popleft().result()


def _scan_image(
    view: Crop, with_tile: bool, variants: Sequence[Crop], place: int, advance: Callable[[], None]
) -> ScannedImage | RejectedEntry:
    """Decode and hash one picture. Decodes a JPEG at a reduced size that suffices for a tile."""

    def thumbnail(each: Crop) -> Image.Image:
        small = tile(image, each.bucket, (each.offset, each.flip, each.augmentation), TILE)
        return small if each.hole is None else grey_hole(small, each, place)

    try:
        data = view.image.read_same()
        image, animated = decode(data, at_least=2 * TILE, background=view.image.background), has_more_frames(data)
        shown, varied = thumbnail(view) if with_tile else None, tuple(map(thumbnail, variants))
    except UnusableImage as reason:
        return RejectedEntry(view.image.name, str(reason), source=view.image.source)
    finally:
        advance()
    return ScannedImage(view.image, view.bucket, hash_of(image), shown, varied, animated)


def _compare(found: DatasetReport) -> None:
    by_digest = defaultdict(list)
    for seen in found.usable:
        by_digest[seen.image.digest].append(seen)
    named = (list(dict.fromkeys(seen.image.name for seen in group)) for group in by_digest.values())
    found.exact = [names for names in named if len(names) > 1]
    firsts = [group[0] for group in by_digest.values()]
    groups = near_duplicates([seen.hash for seen in firsts])
    found.near = [[firsts[place].image.name for place in group] for group in groups]


def _read_captions(found: DatasetReport, config: TrainConfig) -> None:
    names: dict[str, dict[str, None]] = defaultdict(dict)  # ordered, and each name once
    prompted = {index for index, source in enumerate(config.sources) if source.prompt is not None}
    shared = set[str]()
    for seen in found.usable:
        for caption in seen.image.captions:
            names[caption][seen.image.name] = None
            shared |= set() if seen.image.source in prompted else {caption}
    found.same_caption = {
        caption: list(group) for caption, group in names.items() if len(group) > 1 and caption in shared
    }
    counts = token_counts(config, list(names))
    found.tokens = counts is not None
    found.reader = config.model.text.encoders[0]
    limit = found.reader.limit if found.tokens else LONG
    lengths = dict(zip(names, counts or map(len, names), strict=True))
    longest = {seen.image.name: max(map(lengths.__getitem__, seen.image.captions)) for seen in found.usable}
    found.long = [(name, length) for name, length in longest.items() if length > limit]


def _count(found: DatasetReport, plan: Plan) -> None:
    lost: dict[Size, list[float]] = defaultdict(list)
    found.held_out = [sample.image.name for sample in plan.held_out]
    held = set(found.held_out)
    for seen in found.usable:
        if seen.image.name not in held:
            lost[seen.bucket].append(seen.lost)
    for size, members in plan.buckets.items():
        batches = sum(-(-len(part) // plan.batch_size) for key, part in plan.dealt.items() if key[:2] == size)
        shares: Sequence[float] = lost[size]
        row = BucketRow(
            size=size,
            images=len(shares),
            samples=len(members),
            batches=batches,
            fillers=batches * plan.batch_size - len(members),
            lost=sum(shares) / len(shares),
        )
        found.buckets.append(row)
    found.buckets.sort(key=lambda row: (-row.samples, row.size))
    found.steps = plan.steps_per_epoch
    found.batch = plan.batch_size * plan.accumulation
