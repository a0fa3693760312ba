"""Several data sources in one run, mixed by one plan; each picture follows the fields of its own source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from simpletune.data.prompts import prompt_of
from simpletune.data.sources.accounts import join_accounts
from simpletune.data.sources.augmentation import format_augmentation
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.source import RejectedEntry, Scan, Source, SourceImage
from simpletune.data.sources.stream import Stream
from simpletune.data.sources.table import Table
from simpletune.models.shared.buckets import STEP
from simpletune.system.options import Option, Problem, UserError, join_names, plural
from simpletune.system.printable import printable_name

if TYPE_CHECKING:
    from simpletune.models.shared.family import Family


def _refuse_stream(source: object) -> object:
    """Refuse a stream. Raises ValueError: the plan mixes pictures that it lists; a stream's rows are in its shards'
    order."""
    if isinstance(source, Mapping) and source.get("source") == "stream":
        raise ValueError(
            'source "stream" does not mix with other sources: the order of an epoch follows its shards, and repeats '
            'and weights need a list of all pictures. Use source "table" for parquet files, or the stream alone as data'
        )
    return source


One = Annotated[Folder | Table, Field(discriminator="source"), BeforeValidator(_refuse_stream)]


class MultiSource(Option):
    """Several sources of pictures, mixed in every epoch."""

    source: Literal["several"] = "several"
    """Several sources; needs data.sources, and may be left out where that is set."""
    sources: Annotated[list[One], Field(min_length=1, max_length=64)]
    """Sources (concepts, subsets, backends) with fields of their own: repeats, weight, prompt, resolution, aspect,
    captions. The same folder may be listed more than once, as for a bucketed and a square copy. An override of
    data.FIELD sets the field in every source, of data.sources.0.FIELD in the first."""

    streamed: ClassVar[bool] = False
    """Whether rows are read when they are needed; no such source mixes with others."""

    @property
    def members(self) -> tuple[Source, ...]:
        return tuple(self.sources)

    @property
    def place(self) -> str:
        """Distinct paths, for messages."""
        return ", ".join(dict.fromkeys(source.path for source in self.sources))

    @property
    def resolution(self) -> int:
        """Largest resolution in pixels: the default size of validation pictures, and the size that memory must hold."""
        return max(source.resolution for source in self.sources)

    @property
    def prompt(self) -> str | None:
        """Prompt of all pictures but those for regularization; None if they have captions or different prompts."""
        prompts = {source.prompt for source in self.sources if not source.regularization}
        return prompts.pop() if len(prompts) == 1 else None


Data = Annotated[Folder | Table | Stream | MultiSource, Field(discriminator="source")]
"""The type of ``data``. A new source takes a file here and a line in this union, and in ``One`` if it may be mixed."""


def subjects(data: Source | MultiSource) -> list[Source]:
    """Return the sources that are not for regularization."""
    return [source for source in data.members if not source.regularization]


def field_of(data: Source | MultiSource, index: int, name: str) -> str:
    """Return the dotted path of a source's field: ``data.path``, or ``data.sources.0.path`` of one of several."""
    return f"data.{name}" if isinstance(data, Source) else f"data.sources.{index}.{name}"


def source_rules(data: Source | MultiSource) -> Iterator[Problem]:
    """Check what concerns all sources together."""
    if not subjects(data):
        yield Problem(
            field_of(data, 0, "regularization"),
            "true in every source, so nothing would be learned. Set it to false where the subject or style is",
        )
    for index, source in enumerate(data.members):
        if source.inpainting_mask == "own" and source.mask is None:
            yield Problem(
                field_of(data, index, "inpainting_mask"),
                f"own, but the pictures have no masks. Set {field_of(data, index, 'mask')}, or use random",
            )
        elif source.inpainting_mask == "own" and source.unmasked_weight:
            yield Problem(
                field_of(data, index, "unmasked_weight"),
                f"{source.unmasked_weight:g}, but with inpainting_mask own the mask is the hole, and weighs no loss. "
                "Use inpainting_loss, or 0",
            )


def inpainting_rules(data: Source | MultiSource, model: Family) -> Iterator[Problem]:
    """Check that only models that inpaint have sources with holes; the model's configuration must be known."""
    for index, source in enumerate(data.members):
        for name, value in (("inpainting_mask", source.inpainting_mask), ("inpainting_loss", source.inpainting_loss)):
            if value in ("own", "inside") and not model.inpaints:
                channels = model.autoencoder.channels
                yield Problem(
                    field_of(data, index, name),
                    f"{value} is for inpainting models, whose input has {2 * channels + 1} channels; this model's has "
                    f"{channels}. Leave it out, set model.inpainting, or name an inpainting model",
                )


def source_notes(
    data: Source | MultiSource, images: Sequence[SourceImage] = (), inpaints: bool = False
) -> Iterator[str]:
    """Say what a user should know about variants; ``images`` are all sources', if they were scanned. ``inpaints``:
    whether the model does, as far as is known."""
    for index, source in enumerate(data.members):
        several = any(len(image.captions) > 1 for image in images if image.source == index)
        prompts_vary = several or source.shuffle_tags or source.tag_dropout > 0
        if source.variants == 1 and prompts_vary:
            yield (
                f"{field_of(data, index, 'variants')} is 1, so each picture keeps one prompt: one of its captions, one "
                "order of its tags. Use 4 or more to vary it"
            )
        if source.variants == 1 and format_augmentation(source):
            yield (
                f"{field_of(data, index, 'variants')} is 1, so no picture is augmented: the first variant stays as it "
                "is. Use 4 or more"
            )
        if source.variants == 1 and inpaints and source.inpainting_mask == "random" and not source.regularization:
            yield (
                f"{field_of(data, index, 'variants')} is 1, so each picture keeps one hole, drawn at random. Use 8 or "
                "more to vary it; each takes as much room in the cache as a picture"
            )


def source_problems(data: Source | MultiSource, paths: Sequence[Path | None]) -> Iterator[Problem]:
    """Check every source at its path, without reading its pictures; None skips one."""
    for index, (source, path) in enumerate(zip(data.members, paths, strict=True)):
        for problem in source.problems(path) if path is not None else ():
            yield replace(problem, path=field_of(data, index, problem.path.removeprefix("data.")))


def scan_sources(data: Source | MultiSource) -> Scan:
    """Scan every source, with ``demo:`` names resolved; record the source of each picture and unusable entry.

    Raises:
        UserError: one cannot be scanned at all.
    """
    if isinstance(data, Source):
        return _with_hint_at_hdr(data.scan(Path(data.path)))
    scans = []
    for index, source in enumerate(data.members):
        try:
            scans.append(_with_hint_at_hdr(source.scan(Path(source.path))))
        except UserError as error:
            name = str(error).removeprefix("data.")
            raise UserError(str(error) if name == str(error) else field_of(data, index, name), error.code) from None
    by_captions: dict[str, list[str]] = {}
    for index, scan in enumerate(scans):
        by_captions.setdefault(scan.captions, []).append(str(index))
    return Scan(
        [replace(image, source=index) for index, scan in enumerate(scans) for image in scan.images],
        [replace(each, source=index) for index, scan in enumerate(scans) for each in scan.rejected],
        "; ".join(f"{text} (source {', '.join(indices)})" for text, indices in by_captions.items()),
        sum((Counter(scan.left_alone) for scan in scans), Counter[str]()),
        tuple(dict.fromkeys(hint for scan in scans for hint in scan.hints)),
        tuple(dict.fromkeys(note for scan in scans for note in scan.notes)),
        join_accounts((f"{source.path}/", scan.files) for source, scan in zip(data.members, scans, strict=True)),
    )


def _with_hint_at_hdr(scan: Scan) -> Scan:
    """Add a hint at pictures of high dynamic range to a source's scan."""
    hdr = [image for image in scan.images if image.decoding.hdr]
    if not hdr:
        return scan
    kinds = " and ".join(sorted({image.decoding.hdr for image in hdr}))
    names = join_names([printable_name(image.name) for image in hdr])
    hint = (
        f"{plural(len(hdr), 'picture has', 'pictures have')} a high dynamic range ({kinds}), which is not converted: "
        f"the colours would be learned washed out. Export without HDR: {names}"
    )
    return replace(scan, hints=(*scan.hints, hint))


def with_paths(
    data: Folder | Table | Stream | MultiSource, change: Callable[[str], str]
) -> Folder | Table | Stream | MultiSource:
    """Change every path of pictures and masks."""
    if isinstance(data, MultiSource):
        return data.model_copy(update={"sources": [with_paths(source, change) for source in data.sources]})
    masks = {"mask_path": change(data.mask_path)} if isinstance(data, Folder) and data.mask_path is not None else {}
    return data.model_copy(update={"path": change(data.path), **masks})


def example_prompt(data: Source | MultiSource, seed: int) -> str:
    """Return the prompt of the first picture that is not for regularization; ``demo:`` names are resolved. Raises
    UserError if there is no such picture, or a source cannot be scanned."""
    for image in scan_sources(data).images:
        if not data.members[image.source].regularization:
            return prompt_of(image, data.members[image.source], seed, 0)
    raise UserError(f"data.path: {data.place} contains no usable pictures. Add some")


def stopping_entries(data: Source | MultiSource, rejected: Sequence[RejectedEntry]) -> list[RejectedEntry]:
    """List the unusable entries of the sources whose ``on_error`` is ``stop``."""
    return [each for each in rejected if data.members[each.source].on_error == "stop"]


def find_too_small(images: Sequence[SourceImage], data: Source | MultiSource, step: int = STEP) -> list[RejectedEntry]:
    """Reject pictures that would have to be scaled up by more than their source's ``max_upscale``; ``step`` is that of
    buckets, in pixels."""
    rejected = []
    for image in images:
        source = data.members[image.source]
        if reason := source.explain_too_small(image.size, step, field_of(data, image.source, "max_upscale")):
            rejected.append(RejectedEntry(image.name, reason, source=image.source))
    return rejected
