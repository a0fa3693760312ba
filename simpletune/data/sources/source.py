"""Interface of data sources: usable pictures with captions, and the reasons why others are rejected."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field

from simpletune.data.sources.accounts import Accounts
from simpletune.models.shared.buckets import STEP, Size, nearest_bucket, upscaling
from simpletune.system.options import Json, Option, Problem

HOLES_VERSION = 1  # increment when a hole's pixels change


class UnusableImage(Exception):
    """A picture cannot be used, for the reason given."""


class BytesOnDemand:
    """A picture or a mask, whose bytes are read on demand."""

    digest: str
    read: Callable[[], bytes]
    by_row: bool

    def read_same(self) -> bytes:
        """Read the bytes again. Raises UnusableImage if they cannot be read, or have changed since the scan."""
        data = self.read()
        if not self.by_row and hashlib.sha256(data).hexdigest() != self.digest:
            raise UnusableImage("has changed since the folder was scanned. Restart")
        return data


@dataclass(frozen=True)
class Mask(BytesOnDemand):
    """Mask of the parts of a picture to learn from."""

    kind: Literal["alpha", "file"]
    """``alpha``: the opacity of the picture itself; ``file``: the brightness of a separate file."""
    digest: str  # SHA-256 of the bytes
    read: Callable[[], bytes] = field(compare=False, repr=False)
    by_row: bool = False
    """Whether the digest identifies the row rather than the bytes; reading then verifies the bytes by other means."""


@dataclass(frozen=True)
class Hole:
    """The hole of a crop.

    Args:
        kind: rectangles, brush strokes, or all of the crop; ``own``: the picture's mask.
        draw: seeds rectangles and strokes; 0 for the others.
    """

    kind: Literal["whole", "rectangles", "strokes", "own"]
    draw: int = 0

    def identity(self) -> Json:
        """Return all that its pixels depend on beside the crop."""
        return {"kind": self.kind, "draw": self.draw, "version": HOLES_VERSION}


class Decoding(NamedTuple):
    """How a picture is decoded, where that is out of the ordinary."""

    changes: str = ""
    """What of its pixels follows rules that version 0.1.0 did not have: a part of its key in the cache."""
    hdr: str = ""  # its transfer function for high dynamic range, PQ or HLG; empty: it has none


@dataclass(frozen=True)
class SourceImage(BytesOnDemand):
    """A usable picture."""

    name: str  # a path relative to the source; messages show it, and samples are sorted by it
    caption: str
    size: Size  # (width, height) in pixels, after EXIF rotation
    digest: str  # SHA-256 of its bytes
    read: Callable[[], bytes] = field(compare=False, repr=False)
    source: int = 0  # the index of its source in ``data.sources``
    more: tuple[str, ...] = ()  # its other captions, if it has several
    weights: tuple[float, ...] = ()  # how often to use each of its captions, relative to the others; empty: equally
    repeats: int = 1  # how often its folder's name repeats it, beside ``data.repeats``
    mask: Mask | None = None  # None: learn from all of the picture
    by_row: bool = False
    """Whether the digest identifies a row of a data set in shards, known without reading the picture, rather than the
    bytes; reading then verifies the bytes by other means."""
    as_it_is: bool = False  # whether its caption is ``data.missing_prompt``, to which nothing is added
    decoding: Decoding = Decoding()
    background: str = "white"  # of its transparent parts: ``data.background``

    @property
    def captions(self) -> tuple[str, ...]:
        """All its captions."""
        return self.caption, *self.more


@dataclass(frozen=True)
class RejectedEntry:
    """An entry that cannot be used, and why."""

    name: str  # the name of the picture, the folder or the line (``metadata.jsonl:3``)
    reason: str  # the predicate of a sentence whose subject is the name
    kind: Literal["picture", "folder", "line"] = "picture"
    source: int = 0  # the index of its source in ``data.sources``


@dataclass(frozen=True)
class Scan:
    """The result of scanning a data source."""

    images: list[SourceImage]  # the usable pictures, sorted by name
    rejected: list[RejectedEntry]  # the unusable entries
    captions: str  # a description of where the captions come from
    left_alone: Mapping[str, int] = field(default_factory=dict)
    """Pictures of unsupported formats, counted by file extension."""
    hints: tuple[str, ...] = ()  # sentences about data that may not be as the user intended
    notes: tuple[str, ...] = ()  # sentences that explain how data was interpreted
    files: Accounts = field(default_factory=Accounts)  # of a folder: what each of its files is


def _named(path: str) -> str:
    if not path.strip():
        raise ValueError(
            f"{path!r} is empty. Give the folder that holds the pictures, or demo:pictures, which is built in"
        )
    return path


def _colour(name: str) -> str:
    from PIL import ImageColor

    if not re.fullmatch(r"#[0-9a-fA-F]{6}", name) and name.lower() not in ImageColor.colormap:
        raise ValueError(f"{name[:40]!r} is no colour. Use a name, such as white or grey, or #rrggbb")
    return name.lower()


class Source(Option):
    """Fields shared by all data sources."""

    if TYPE_CHECKING:  # every member declares it, so that its tag comes first in JSON
        source: str
        mask: str | None

    streamed: ClassVar[bool] = False
    """Whether its rows are found by number and read when they are needed, instead of listed before the run."""

    path: Annotated[str, AfterValidator(_named)]
    """Path of the pictures; demo:style, demo:pictures and demo:subject are small built-in folders."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """A single prompt for all pictures, instead of captions."""
    resolution: Annotated[int, Field(ge=32, le=4096)] = 1024
    """Side in pixels of a square with the area that every picture is scaled to; a multiple of 16 for SD3, FLUX.2
    klein, Z-Image and Qwen-Image, of 64 for SDXL, SD 1.5 and 2. Default: 512 for SD 1.5 and 2, 1024 for the others."""
    aspect: Literal["buckets", "square"] = "buckets"
    """Keep the pictures' aspect ratios (sides in steps of 64 px for SDXL, SD 1.5 and 2, 16 for the others),
    or crop all pictures to squares."""
    background: Annotated[str, AfterValidator(_colour)] = "white"
    """Colour behind the transparent parts of pictures: a name (white, grey, ...) or #rrggbb."""
    max_aspect: Annotated[float, Field(ge=1, le=8)] = 4.0
    """Largest ratio of a bucket's longer to its shorter side; longer pictures are cropped."""
    max_upscale: Annotated[float, Field(ge=1)] | None = 2.0
    """Reject a picture that would have to be scaled up by more than this factor to fill its bucket; null: no limit."""
    crop: Literal["center", "random"] = "center"
    """Which part of a picture to keep when cropping it to its bucket."""
    flip: bool = False
    """Mirror half of the presentations left to right."""
    variants: Annotated[int, Field(ge=1, le=64)] = 1
    """How many crops, flips, augmentations and prompts of each picture to draw and cache; training cycles through
    them."""
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Multiply the brightness of each variant but the first by a factor from 1 - this to 1 + this (ColorJitter)."""
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The same for the distance of all values from their mean grey."""
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The same for the distance of every pixel from its grey."""
    hue: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Shift the hue of each variant but the first by up to this many degrees, either way."""
    rotation: Annotated[float, Field(ge=0, le=45)] = 0.0
    """Rotate each variant but the first by up to this many degrees, either way, with its mask. It is enlarged until no
    corner is empty: 1.08 times for a square at 5 degrees."""
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often each picture appears in an epoch."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of its pictures' loss; for a regularization source the prior loss weight."""
    regularization: bool = False
    """Use the pictures for prior preservation, as a class that the model must not forget. They are trained on like all
    others, but never held out or evaluated, and their captions are never the validation prompt. At least one source
    must not set it."""
    caption_lines: Literal["join", "several"] = "join"
    """Lines of a caption (multiline). join: join them with spaces; several: each is a caption of its own, and each
    variant uses one. A list of texts in metadata.jsonl or a table is several captions either way. Each may begin with
    its weight, such as 3::a dog."""
    caption_prefix: str = ""
    """Text before every caption, such as a trigger word; a space is added."""
    caption_suffix: str = ""
    """Text after every caption; a space is added unless it starts with punctuation."""
    shuffle_tags: bool = False
    """Shuffle the tags of a caption (shuffle_caption), once for each variant."""
    tag_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability of dropping a tag from a caption (caption_tag_dropout_rate), drawn once for each variant."""
    keep_tags: Annotated[int, Field(ge=0)] = 0
    """How many tags at the start of a caption to neither shuffle nor drop (keep_tokens)."""
    tag_separator: Annotated[str, Field(min_length=1, max_length=8)] = ","
    """Text between tags."""
    unmasked_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Factor of the loss outside a picture's mask (unmasked share); 0: learn nothing from there."""
    inpainting_mask: Literal["random", "own"] = "random"
    """What an inpainting model learns to paint. random: rectangles, brush strokes or, for a quarter, the whole picture,
    drawn once for each variant; own: the picture's mask (data.mask), which then does not weigh the loss."""
    inpainting_loss: Literal["everywhere", "inside"] = "everywhere"
    """Where an inpainting model's loss counts: everywhere, as the published models were trained, or only inside of what
    it paints."""
    caption_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability of replacing a caption with the empty prompt; 0.05 to 0.1 helps classifier-free guidance."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do if pictures are unusable: stop and list them, or continue without them."""

    @property
    def members(self) -> tuple[Source, ...]:
        """This source alone, in the form of a list of several sources."""
        return (self,)

    @property
    def weighs_places(self) -> bool:
        """Whether the loss differs between the places of a picture, by its mask or by what is to be painted."""
        return self.inpainting_loss == "inside" or (self.mask is not None and self.inpainting_mask == "random")

    @property
    def place(self) -> str:
        """The path as the configuration names it, for messages."""
        return self.path

    def bucket(self, image: Size, step: int = STEP) -> Size:
        """Return the size in pixels that a picture of this size is cropped to, in multiples of ``step``."""
        if self.aspect == "square":
            return self.resolution, self.resolution
        return nearest_bucket(image, self.resolution, self.max_aspect, step)

    def explain_too_small(self, image: Size, step: int, field: str) -> str | None:
        """Say why a picture of this size would have to be scaled up by more than ``max_upscale``, which messages call
        ``field``; None: it would not."""
        scale = upscaling(image, self.bucket(image, step))
        if self.max_upscale is None or scale <= self.max_upscale:
            return None
        size, limit = f"{image[0]}x{image[1]}", f"the limit is {field}={self.max_upscale:g}"
        return f"is too small: {size} would be scaled up {scale:.1f} times; {limit}"

    def problems(self, path: Path) -> Iterator[Problem]:
        """Check a source without reading its pictures.

        Args:
            path: where it is, with ``demo:`` names resolved.
        """
        raise NotImplementedError

    def scan(self, path: Path) -> Scan:
        """Find the usable pictures and their captions.

        Args:
            path: where they are, with ``demo:`` names resolved.

        Raises:
            UserError: the source cannot be read at all.
        """
        raise NotImplementedError
