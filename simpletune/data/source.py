"""What every data source offers: the pictures it found, their captions, and the reasons why others cannot be used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from simpletune.models.buckets import STEP, Size
from simpletune.options import Option


class UnusablePicture(Exception):
    """The reason why a picture cannot be used."""


@dataclass(frozen=True)
class Picture:
    """A usable picture: its bytes are read when needed.

    Args:
        name: the picture's name in messages and in the order of samples (a path relative to the source).
        caption: its prompt.
        size: (width, height) in pixels, after EXIF rotation.
        digest: SHA-256 of its bytes.
        read: returns its bytes.
    """

    name: str
    caption: str
    size: Size
    digest: str
    read: Callable[[], bytes] = field(compare=False, repr=False)

    def read_same(self) -> bytes:
        """The bytes that were scanned: what is kept under a digest is what had it.

        Raises:
            UnusablePicture: they cannot be read, or have changed.
        """
        data = self.read()
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise UnusablePicture("was changed since the folder was scanned. Start again")
        return data


@dataclass(frozen=True)
class Rejected:
    """Something that cannot be used, and why.

    Args:
        name: of the picture, of the folder, or of the line (``metadata.jsonl:3``).
        reason: follows the name in a sentence.
        kind: what has the name.
    """

    name: str
    reason: str
    kind: Literal["picture", "folder", "line"] = "picture"


@dataclass(frozen=True)
class Scan:
    """What a data source found.

    Args:
        pictures: the usable pictures, in the order of their names.
        rejected: the others.
        captions: where captions came from, in words.
        left_alone: pictures of formats that are not read, counted by their files' endings.
        hints: what may be meant otherwise than it is taken, a sentence each.
    """

    pictures: list[Picture]
    rejected: list[Rejected]
    captions: str
    left_alone: Mapping[str, int] = field(default_factory=dict)
    hints: tuple[str, ...] = ()


def _multiple_of_step(resolution: int) -> int:
    if resolution % STEP:
        low = resolution // STEP * STEP
        raise ValueError(f"{resolution} is not a multiple of {STEP}. Use {low or STEP} or {low + STEP}")
    return resolution


def _named(path: str) -> str:
    if not path.strip():
        raise ValueError(
            f"{path!r} names nothing. Give the folder that holds the pictures; demo:pictures comes with the tool"
        )
    return path


class Source(Option):
    """Fields that every data source has."""

    path: Annotated[str, AfterValidator(_named)]
    """Where the pictures are; demo:pictures and demo:subject are small folders that come with the tool."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """One prompt for all pictures, instead of captions."""
    resolution: Annotated[int, Field(ge=32, le=4096), AfterValidator(_multiple_of_step)] = 1024
    """Side in pixels of the square whose area every picture gets; a multiple of 16."""
    aspect: Literal["buckets", "square"] = "buckets"
    """Keep the pictures' aspect ratios (in steps of 16 px), or crop them all to squares."""
    max_aspect: Annotated[float, Field(ge=1, le=8)] = 4.0
    """Longest over shortest side of a bucket; what is longer is cropped."""
    max_upscale: Annotated[float, Field(ge=1)] | None = 2.0
    """A picture that would have to be scaled up more than this to fill its bucket cannot be used; null: no limit."""
    crop: Literal["center", "random"] = "center"
    """Which part of a picture is kept where its bucket is shorter."""
    flip: bool = False
    """Mirror half of the presentations left to right."""
    variants: Annotated[int, Field(ge=1, le=64)] = 1
    """How many crops and flips of each picture are cached; presentations take them in turn."""
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often each picture appears in an epoch."""
    caption_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of presentations that are trained with the empty prompt; 0.05 to 0.1 helps guidance."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do when a picture cannot be used: stop with the list, or go on without it."""
