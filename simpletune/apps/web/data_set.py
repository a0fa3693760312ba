"""The pictures on the page Data: one folder source, alone or from a configuration."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from urllib.parse import urlencode

from simpletune.apps.web.form.presets import card_here
from simpletune.apps.web.roots import Roots
from simpletune.commands.caption.pictures import require_text_captions
from simpletune.commands.caption.record import Record
from simpletune.commands.init.choices import TINY, TINY_SIDE
from simpletune.commands.inspect_data.caption_edits import CaptionedPicture, picture_files, read_captions
from simpletune.commands.inspect_data.prompt_cuts import Cut, Cutter
from simpletune.config.load import read_config, validate
from simpletune.config.resolve import resolve_data_folder
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.captions import one_line
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.pictures import picture_size
from simpletune.data.sources.source import UnusablePicture
from simpletune.data.sources.walk import SUFFIXES, is_text, read_regular
from simpletune.models.shared.buckets import Size, upscaling
from simpletune.system.options import Json, UserError

PAGE = 48  # pictures
SHOWN = ("all", "without", "model", "cut")
SUGGESTED = 40  # folders
LOOKED_AT = 400  # entries of a root that are searched for suggestions
COUNTED, FOLDERS = 10_000, 500  # entries of a folder that are counted, and folders that are listed


@dataclass(frozen=True)
class DataSet:
    """A folder of pictures and how training would read it."""

    place: Path  # folder or configuration that the user named, absolute
    index: int  # the source's in the configuration
    sources: tuple[str, ...]  # paths of all of them
    config: TrainConfig  # with this source alone
    source: Folder
    folder: Path  # the source's, links resolved
    why_not: str  # why its captions cannot be edited here; empty if they can

    @property
    def key(self) -> str:
        """A name for files about this data set."""
        return hashlib.sha256(f"{self.place}\0{self.index}".encode()).hexdigest()[:16]

    @property
    def query(self) -> str:
        return urlencode({"place": str(self.place), "source": self.index})

    def entries(self) -> list[CaptionedPicture]:
        return read_captions(self.folder, picture_files(self.folder, self.source))

    def entry(self, name: str) -> CaptionedPicture:
        """One picture with its caption; a UserError if the folder has none of this name."""
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
    """Open a folder of pictures, or a source of a configuration, with place and index as in the address; a UserError if
    the place is outside of the roots or missing, or the configuration is wrong."""
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
    """A picture with its caption, as the gallery shows it."""

    id: str
    entry: CaptionedPicture
    version: str  # changes when the file does
    size: Size | None  # in pixels; None if the picture cannot be used
    bucket: Size | None  # that it is cropped to
    problem: str  # why it cannot be used
    cuts: Sequence[Cut]  # encoders that truncate its caption
    seen: str  # the part of its prompt that every encoder sees
    unseen: str  # the rest
    made: bool  # whether a model wrote the caption


def card_id(name: str) -> str:
    """A name for the page's elements about a picture."""
    return "card-" + hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:12]


def picture_tiles(data: DataSet, entries: Sequence[CaptionedPicture]) -> list[PictureTile]:
    prompts = [data.prompt(entry.text) if entry.text else "" for entry in entries]
    every, record = Cutter(data.config).cuts(prompts), Record(data.folder)
    tiles = []
    for entry, prompt, cuts in zip(entries, prompts, every, strict=True):
        version, size, bucket, problem = "", None, None, entry.problem
        try:
            version = str(entry.file.stat().st_mtime_ns)
            size = picture_size(read_regular(entry.file))
            bucket = data.source.bucket(size, data.config.model.multiple)
            scale, limit = upscaling(size, bucket), data.source.max_upscale
            if limit is not None and scale > limit:
                problem = f"is too small: it would be scaled up {scale:.1f} times; the limit is {limit:g}"
        except (UnusablePicture, OSError) as reason:
            problem = str(reason)
        cut = min((cut.place for cut in cuts), default=len(prompt))
        made = entry.caption is not None and record.of(entry.caption) is not None
        tiles.append(
            PictureTile(
                card_id(entry.name), entry, version, size, bucket, problem, cuts, prompt[:cut], prompt[cut:], made
            )
        )
    return tiles


def select_pictures(data: DataSet, show: str, query: str) -> list[CaptionedPicture]:
    """The pictures that the user asked for: one of ``SHOWN``, with a text in name or caption in any case."""
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
        try:
            entries = sorted(root.iterdir())[:LOOKED_AT]
        except OSError:  # unreadable: there is nothing to suggest
            entries = []
        below = (each for each in entries if each.is_dir() and not each.is_symlink() and not each.name.startswith("."))
        found += [folder for folder in (root, *below) if _holds_pictures(folder)]
    return found[:SUGGESTED]


@dataclass(frozen=True)
class FolderLevel:
    """A folder to choose from: how many pictures it holds itself, and the folders below it."""

    path: Path | None  # None: above several roots
    name: str
    pictures: int = 0
    more: bool = False  # whether there are more entries than were counted
    folders: tuple[FolderLevel, ...] = ()  # each without the folders below it
    above: str | None = None  # to ask for the level above; None: there is none


def list_folders(roots: Roots, text: str) -> FolderLevel:
    """List one level of the folders in the roots; empty: the root, or all of them. UserError: it is none of them."""
    if not text and len(roots.named) > 1:
        return FolderLevel(None, "Folders", folders=tuple(_level(root, str(root)) for root in roots.named))
    folder = roots.resolve(text) if text else roots.named[0]
    if not folder.is_dir():
        raise UserError(f"{text} is not a folder. Choose another")
    try:
        entries = sorted(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror or error}). Choose another") from None
    shown = [each for each in entries if not each.name.startswith(".") and is_text(each.name) and each != roots.runs]
    inside = any(folder != root and folder.is_relative_to(root) for root in roots.named)
    above = str(folder.parent) if inside else "" if len(roots.named) > 1 else None
    own = _level(folder, folder.name or str(folder))
    return replace(own, folders=tuple(_level(each, each.name) for each in shown[:FOLDERS]), above=above)


def _level(folder: Path, name: str) -> FolderLevel:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, COUNTED + 1)]
    except OSError:
        names = []
    pictures = sum(each.lower().endswith(SUFFIXES) and not each.startswith(".") for each in names)
    return FolderLevel(folder, name, pictures, len(names) > COUNTED)


def _holds_pictures(folder: Path) -> bool:
    try:
        names = (entry.name.lower() for _, entry in zip(range(LOOKED_AT), folder.iterdir(), strict=False))
        return any(name.endswith(SUFFIXES) and not name.startswith(".") for name in names)
    except OSError:
        return False
