"""The pictures on the page Data: one folder source, alone or from a configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import urlencode

from simpletune.apps.web.form.presets import card_here
from simpletune.apps.web.roots import Roots
from simpletune.commands.caption.pictures import require_text_captions
from simpletune.commands.caption.record import Record
from simpletune.commands.init.defaults import TINY, TINY_SIDE
from simpletune.commands.inspect_data.caption_edits import CaptionedPicture, picture_files, read_captions
from simpletune.commands.inspect_data.prompt_cuts import Cut, Cutter
from simpletune.commands.inspect_data.thumbnails import bucket_of_size
from simpletune.config.load import read_config, validate
from simpletune.config.resolve import resolve_data_folder
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.captions import one_line
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.pictures import picture_size
from simpletune.data.sources.source import UnusablePicture
from simpletune.data.sources.walk import SUFFIXES, read_regular
from simpletune.models.shared.buckets import Size, upscaling
from simpletune.system.options import Json, UserError

PAGE = 48  # pictures
SHOWN = ("all", "without", "model", "cut")
SUGGESTED = 40  # folders
LOOKED_AT = 400  # entries of a root that are searched for suggestions


@dataclass(frozen=True)
class DataSet:
    """A folder of pictures and how training would read it.

    Args:
        place: folder or configuration that the user named, absolute.
        index: the source's index in the configuration.
        sources: paths of all its sources.
        config: the configuration with this source alone.
        source: this source.
        folder: its folder, links resolved.
        why_not: why its captions cannot be edited here; empty if they can.
    """

    place: Path
    index: int
    sources: tuple[str, ...]
    config: TrainConfig
    source: Folder
    folder: Path
    why_not: str

    @property
    def key(self) -> str:
        """A name for files about this data set."""
        return hashlib.sha256(f"{self.place}\0{self.index}".encode()).hexdigest()[:16]

    @property
    def query(self) -> str:
        """The query string that names it."""
        return urlencode({"place": str(self.place), "source": self.index})

    def entries(self) -> list[CaptionedPicture]:
        """All pictures with their captions."""
        return read_captions(self.folder, picture_files(self.folder, self.source))

    def entry(self, name: str) -> CaptionedPicture:
        """One picture.

        Raises:
            UserError: the folder has no picture of this name.
        """
        file = self.picture(name)
        if file is None:
            raise UserError(f"{name}: the folder no longer has this picture. Reload the page")
        return read_captions(self.folder, [file])[0]

    def picture(self, name: str) -> Path | None:
        """The file of a picture; None if there is none, or a link leads out of the folder."""
        parts = PurePosixPath(name).parts
        if not name.lower().endswith(SUFFIXES) or any(part.startswith(".") for part in parts):
            return None
        file = self.folder / name
        try:
            inside = all(each.resolve().is_relative_to(self.folder) for each in (file, file.parent))
            return file if inside and file.is_file() else None
        except (OSError, ValueError, RuntimeError):  # a null byte, an overlong name, a loop of links
            return None

    def prompt(self, caption: str) -> str:
        """A caption as the text encoders receive it."""
        parts = (self.source.caption_prefix.strip(), one_line(caption), self.source.caption_suffix.strip())
        return " ".join(part for part in parts if part)


def open_data_set(roots: Roots, place: str, index: str) -> DataSet:
    """Open a folder of pictures, or a source of a configuration.

    Args:
        roots: what the pages may touch.
        place: as the user typed it.
        index: the source's index, as in the address.

    Raises:
        UserError: the place is outside of the roots, missing, or the configuration is wrong.
    """
    path = roots.resolve(place)
    if not path.exists():
        raise UserError(f"{place} does not exist below {', '.join(map(str, roots.named))}. Give a folder with pictures")
    status = path.stat()
    config = _config_of(path, (0, 0) if path.is_dir() else (status.st_mtime_ns, status.st_size))
    members = config.data.members
    number = int(index) if index.isdecimal() and int(index) < len(members) else 0
    source = members[number]
    if not isinstance(source, Folder):
        raise UserError(f"data.source: {source.path} is a table. This page shows folders of pictures")
    folder = roots.resolve(str(Path(source.path).absolute()))
    if not folder.is_dir():
        raise UserError(f"data.path: {source.path} is not a folder. Give the folder that holds the pictures")
    try:
        require_text_captions(source.model_copy(update={"path": str(folder)}), "")
        why_not = ""
    except UserError as reason:
        why_not = str(reason)
    alone = config.model_copy(update={"data": source.model_copy(update={"path": str(folder)})})
    return DataSet(path, number, tuple(each.path for each in members), alone, source, folder, why_not)


@lru_cache(maxsize=16)
def _config_of(path: Path, version: tuple[int, int]) -> TrainConfig:
    """A file's configuration, or the one with which Start trains a folder; cached, because validation takes 50 ms."""
    if path.is_dir():
        data: Json = {"name": "data", "data": {"path": str(path)}}
        if card_here() is None:  # the tiny model, at its size
            data["data"]["resolution"] = TINY_SIDE
            data["model"] = {"pretrained": TINY}
        return validate(data, str(path), needs_data=False, needs_model=False)
    return resolve_data_folder(read_config(path, needs_data=False, needs_model=False)[0])


@dataclass(frozen=True)
class PictureTile:
    """What the page shows about a picture.

    Args:
        entry: the picture and its caption.
        version: changes when the file does.
        size: size in pixels; None if the picture cannot be used.
        bucket: the bucket that it is cropped to.
        problem: why it cannot be used.
        cuts: encoders that truncate its caption.
        seen: the part of its prompt that every encoder sees.
        unseen: the rest.
        made: whether a model wrote the caption.
    """

    entry: CaptionedPicture
    version: str
    size: Size | None
    bucket: Size | None
    problem: str
    cuts: Sequence[Cut]
    seen: str
    unseen: str
    made: bool

    @property
    def id(self) -> str:
        """A name for the page's elements."""
        return card_id(self.entry.name)


def card_id(name: str) -> str:
    """A name for the elements about a picture."""
    return "card-" + hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:12]


def picture_tiles(data: DataSet, entries: Sequence[CaptionedPicture]) -> list[PictureTile]:
    """Make the cards of pictures and captions.

    Args:
        data: the data set.
        entries: the entries of one page.
    """
    prompts = [data.prompt(entry.text) if entry.text else "" for entry in entries]
    every, record = Cutter(data.config).cuts(prompts), Record(data.folder)
    return [
        _card(data, entry, prompt, cuts, record) for entry, prompt, cuts in zip(entries, prompts, every, strict=True)
    ]


def _card(data: DataSet, entry: CaptionedPicture, prompt: str, cuts: Sequence[Cut], record: Record) -> PictureTile:
    version, size, bucket, problem = "", None, None, entry.problem
    try:
        version = str(entry.file.stat().st_mtime_ns)
        size = picture_size(read_regular(entry.file))
        bucket = bucket_of_size(size, data.source, data.config.model.multiple)
        scale, limit = upscaling(size, bucket), data.source.max_upscale
        if limit is not None and scale > limit:
            problem = f"is too small: it would be scaled up {scale:.1f} times; the limit is {limit:g}"
    except (UnusablePicture, OSError) as reason:
        problem = str(reason)
    place = min((cut.place for cut in cuts), default=len(prompt))
    made = entry.caption is not None and record.of(entry.caption) is not None
    return PictureTile(entry, version, size, bucket, problem, cuts, prompt[:place], prompt[place:], made)


def select_pictures(data: DataSet, show: str, query: str) -> list[CaptionedPicture]:
    """The pictures that the user asked for.

    Args:
        data: the data set.
        show: one of ``SHOWN``.
        query: text in the name or the caption, case-insensitive.
    """
    entries = data.entries()
    if show == "without":
        entries = [entry for entry in entries if not entry.text]
    elif show == "model":
        record = Record(data.folder)
        entries = [entry for entry in entries if entry.caption and record.of(entry.caption) is not None]
    elif show == "cut":
        cuts = Cutter(data.config).cuts([data.prompt(entry.text) if entry.text else "" for entry in entries])
        entries = [entry for entry, found in zip(entries, cuts, strict=True) if found]
    wanted = query.casefold()
    return [entry for entry in entries if wanted in entry.name.casefold() or wanted in entry.text.casefold()]


def suggestions(roots: Roots) -> list[Path]:
    """Folders with pictures in the roots and one level below them."""
    found: list[Path] = []
    for root in roots.named:
        found += [folder for folder in _folders(root) if _holds_pictures(folder)]
    return found[:SUGGESTED]


def _folders(root: Path) -> Iterator[Path]:
    yield root
    try:
        entries = sorted(root.iterdir())[:LOOKED_AT]
    except OSError:  # unreadable: there is nothing to suggest
        return
    yield from (each for each in entries if each.is_dir() and not each.is_symlink() and not each.name.startswith("."))


def _holds_pictures(folder: Path) -> bool:
    try:
        names = (entry.name.lower() for _, entry in zip(range(LOOKED_AT), folder.iterdir(), strict=False))
        return any(name.endswith(SUFFIXES) and not name.startswith(".") for name in names)
    except OSError:
        return False
