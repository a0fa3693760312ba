"""The pictures on the page Data: one source, a folder or a table, alone or from a configuration."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlencode

from simpletune.apps.http import whole_number
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.scans import version_of
from simpletune.commands.caption.record import Record
from simpletune.commands.caption.uncaptioned_images import require_text_captions
from simpletune.commands.inspect_data.caption_edits import CaptionedImage, read_captions
from simpletune.commands.inspect_data.folder_config import page_config
from simpletune.commands.inspect_data.prompt_cuts import Cut, Cutter
from simpletune.commands.inspect_data.scan import DatasetReport
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_data_folder
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import TINY_SD3
from simpletune.data.sources.caption_files import CaptionFile
from simpletune.data.sources.captions import one_line
from simpletune.data.sources.folder import CaptionReader, Folder
from simpletune.data.sources.image_files import image_size
from simpletune.data.sources.mask_files import MaskFile, read_mask
from simpletune.data.sources.masks import without_masks
from simpletune.data.sources.source import Mask, UnusableImage
from simpletune.data.sources.table import SUFFIXES as TABLES
from simpletune.data.sources.table import Table
from simpletune.data.sources.walk import SUFFIXES, is_text, read_regular, replace_surrogates, walk
from simpletune.models.families import FAMILIES
from simpletune.models.shared.buckets import Size, upscaling
from simpletune.system.options import UserError

MODELS = {
    **{family.pretrained: family.pretrained for family in FAMILIES},
    TINY_SD3: "the tiny model that comes with simpletune, for trying out",
}
"""The models that a folder's pictures can be shown for, with their titles."""
ANY = "any"
PAGE = 48  # pictures
SHOWN = ("all", "without", "model", "cut", "unmasked")
ORDERS = {
    "name": "name",
    "small": "smallest first",
    "large": "largest first",
    "cropped": "most cropped first",
    "alike": "duplicates first",
}
ROWS = 10 * PAGE  # of a table that are shown
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
    source: Folder | Table
    folder: Path  # the source's, links resolved; a table may be a file
    mask_folder: Path | None = None  # data.mask_path, links resolved
    why_no_masks: str = ""  # why masks cannot be painted here; empty if they can
    model: str = ""  # that a folder's pictures are shown for; empty: the configuration's
    side: str = ""  # the resolution that they are shown for; empty: the model's own
    upscale: str = ""  # ``any``: however small they are

    @property
    def key(self) -> str:
        """A name for files about this data set."""
        return hashlib.sha256(f"{self.place}\0{self.index}".encode()).hexdigest()[:16]

    @property
    def is_table(self) -> bool:
        return isinstance(self.source, Table)

    @property
    def given(self) -> dict[str, str]:
        """What an address or a form says of it."""
        given = {"place": str(self.place), "source": str(self.index), "model": self.model, "side": self.side}
        given["upscale"] = self.upscale
        return {name: value for name, value in given.items() if value}

    @property
    def query(self) -> str:
        return urlencode(self.given)

    @cached_property
    def why_not(self) -> str:
        """Why its captions cannot be edited here; empty if they can."""
        if isinstance(self.source, Table):
            return "a table holds them"
        try:
            require_text_captions(self.source, "")
        except UserError as reason:
            return str(reason)
        return ""

    @cached_property
    def version(self) -> str:
        """As ``version_of``, of the folder as this request finds it."""
        return version_of(self.folder)[0]

    def files(self) -> list[Path]:
        """List the pictures of a folder; masks are none."""
        return list(_files(self.folder, self.source, self.version)[0])

    def entries(self) -> list[CaptionedImage]:
        if isinstance(self.source, Table):
            return list(_rows(self.source, _version(self.folder)))
        return self.captioned(self.files())

    def captioned(self, images: Sequence[CaptionedImage | Path]) -> list[CaptionedImage]:
        """Read the captions of pictures given as files; the others have theirs."""
        files = [each for each in images if isinstance(each, Path)]
        if not files or isinstance(self.source, Table):
            return [each for each in images if isinstance(each, CaptionedImage)]
        others = _files(self.folder, self.source, self.version)[1]
        if self.why_not:
            return _captions_elsewhere(self.source, self.folder, files, others)
        entries = read_captions(self.folder, files)
        if self.source.reading == "0.1" or all(each.text for each in entries):
            return entries
        if not others:
            return entries
        reader = self.source.caption_reader(self.folder, files, others)
        return [each if each.text else _read_as_training(each, reader) for each in entries]

    def entry(self, name: str) -> CaptionedImage:
        """Return one picture with its caption. Raises UserError if the folder has none of this name."""
        file = self.image(name)
        if file is None:
            raise UserError(f"{name}: the folder no longer has this picture. Reload the page")
        return read_captions(self.folder, [file])[0]

    def image(self, name: str) -> Path | None:
        """Return the file of a picture; None if there is none, or a link leads out of the folder."""
        parts = PurePosixPath(name).parts
        if not name.lower().endswith(SUFFIXES) or any(part.startswith(".") for part in parts):
            return None
        file = self.folder / name
        try:
            inside = all(each.resolve().is_relative_to(self.folder) for each in (file, file.parent))
            return file if inside and file.is_file() else None
        except (OSError, ValueError, RuntimeError):  # a null byte, an overlong name, a loop of links
            return None

    def mask(self, file: Path) -> MaskFile:
        """Read the mask of a picture of the folder, as ``read_mask`` does."""
        return read_mask(self.folder, self.mask_folder, file)

    def content(self, name: str, masked: bool) -> ImageContent | None:
        """Return what to make a thumbnail of; None if there is no such picture, or no mask if it is asked for."""
        if isinstance(self.source, Table):
            row = next((row for row in _rows(self.source, _version(self.folder)) if row.name == name), None)
            if row is None or row.content is None or (masked and row.content.mask is None):
                return None
            return row.content if masked else replace(row.content, mask=None)
        file = self.image(name)
        if file is None:
            return None
        read, version = partial(read_regular, file), f"{file}\0{_version(file)}"
        if not masked:
            return ImageContent(read, version)
        if self.source.mask == "alpha":
            return ImageContent(read, version, Mask("alpha", "", read))
        found = self.mask(file).found
        if found is None:
            return None
        return ImageContent(read, f"{version}\0{_version(found)}", Mask("file", "", partial(read_regular, found)))

    def prompt(self, caption: str) -> str:
        """Format a caption as the text encoders receive it."""
        parts = (self.source.caption_prefix.strip(), one_line(caption), self.source.caption_suffix.strip())
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class ImageContent:
    """A picture's bytes, and its mask."""

    read: Callable[[], bytes]
    version: str  # changes when the picture or the mask does
    mask: Mask | None = None


@dataclass(frozen=True)
class TableRow(CaptionedImage):
    """A row of a table."""

    content: ImageContent | None = None  # None if it cannot be used
    size: Size | None = None


@dataclass(frozen=True)
class UneditedImage(CaptionedImage):
    """A picture whose caption lies where this page does not write, such as in a table of all captions."""

    read: str = ""

    @property
    def text(self) -> str:
        return self.read


def _read_as_training(entry: CaptionedImage, reader: CaptionReader) -> CaptionedImage:
    """Give a picture without a text of its own the caption that training reads from another file, if there is one."""
    try:
        captions = reader.caption_of(entry.file)
    except UnusableImage:  # it has none, or the entry says what is wrong with it
        return entry
    from_file = any(file.is_file() for file in reader.files_of(entry.file))
    return UneditedImage(entry.name, entry.file, None, "", "\n".join(captions)) if from_file else entry


@lru_cache(maxsize=4)
def _files(folder: Path, source: Folder, version: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """List the pictures of a folder, and its other files; again when it changes, which takes a second for 100,000."""
    found = walk(folder, source.links, source.reading)
    return tuple(without_masks(found.images, source.mask, source.mask_path)[0]), tuple(found.others)


@lru_cache(maxsize=2)
def _rows(source: Table, version: str) -> tuple[TableRow, ...]:
    """Read the first rows of a table, by name."""
    limited, place = source.model_copy(update={"limit": min(ROWS, source.limit or ROWS)}), Path(source.path)
    scan = limited.scan(place)
    rows = [
        TableRow(
            each.name,
            place / each.name,
            CaptionFile(place / each.name, each.caption),
            content=ImageContent(each.read_same, each.digest, each.mask),
            size=each.size,
        )
        for each in scan.images
    ]
    rows += [TableRow(each.name, place / each.name, None, each.reason) for each in scan.rejected]
    return tuple(sorted(rows, key=lambda row: row.name))


def _version(file: Path) -> str:
    status = file.stat()
    return f"{status.st_mtime_ns} {status.st_size}"


def _captions_elsewhere(
    source: Folder, folder: Path, files: list[Path], others: Sequence[Path]
) -> list[CaptionedImage]:
    """Read the captions that training takes from metadata.jsonl, file names or data.prompt."""
    try:
        caption_of = source.caption_reader(folder, files, others).caption_of
    except UserError:  # training says why; the pictures can be shown
        return read_captions(folder, files)
    entries = []
    for file in files:
        name = replace_surrogates(file.relative_to(folder).as_posix())
        try:
            entries.append(CaptionedImage(name, file, CaptionFile(file, "\n".join(caption_of(file)))))
        except UnusableImage as reason:
            entries.append(CaptionedImage(name, file, None, str(reason)))
    return entries


def open_data_set(roots: Roots, place: str, index: str, model: str = "", side: str = "", upscale: str = "") -> DataSet:
    """Open a folder of pictures, or a source of a configuration, with place and index as in the address. A folder or a
    table is shown as a run of ``model`` at ``side`` px would see it; empty: of the default model, at its own
    resolution. Raises UserError if the place is outside of the roots or missing, or the configuration is wrong."""
    path = roots.resolve(place)
    if not path.exists():
        raise UserError(f"{place} does not exist below {', '.join(map(str, roots.named))}. Give a folder with pictures")
    status = path.stat()
    if path.is_dir() or path.suffix in TABLES:
        model = model if model in MODELS else FAMILIES[0].pretrained
        side = side if side.isdecimal() and len(side) < 5 else ""
    else:
        model = side = upscale = ""
    version = (0, 0) if path.is_dir() else (status.st_mtime_ns, status.st_size)
    config = _config_of(path, version, model, side, upscale == ANY)
    members = config.sources
    number = whole_number(index) or 0
    number = number if number < len(members) else 0
    source = members[number]
    if not isinstance(source, Folder | Table):
        raise UserError(f"data.source: {source.path} is read while training. This page shows folders and tables")
    folder = roots.resolve(str(Path(source.path).absolute()))
    if not (folder.is_dir() if isinstance(source, Folder) else folder.exists()):
        raise UserError(f"data.path: {source.path} is not a folder. Give the folder that holds the pictures")
    source = source.model_copy(update={"path": str(folder)})
    why_no_masks = ""
    mask_folder = None
    if isinstance(source, Table):
        why_no_masks = "a table's masks are the opacity of its pictures (data.mask=alpha)"
    else:
        try:
            mask_folder = None if source.mask_path is None else roots.resolve(str(Path(source.mask_path).absolute()))
        except UserError as reason:
            why_no_masks = str(reason)
        if source.mask == "alpha":
            why_no_masks = "data.mask=alpha takes the opacity of the pictures"
    alone = config.model_copy(update={"data": source})
    paths = tuple(each.path for each in members)
    return DataSet(path, number, paths, alone, source, folder, mask_folder, why_no_masks, model, side, upscale)


@lru_cache(maxsize=16)
def _config_of(path: Path, version: tuple[int, int], model: str, side: str, upscaled: bool) -> TrainConfig:
    """Read a file's configuration, or make a folder's for a model and a resolution; cached: validation takes 50 ms."""
    if model:
        return page_config(path, model, int(side) if side else None, upscaled)[0]
    return resolve_data_folder(read_config(path, needs_data=False, needs_model=False)[0])


@dataclass(frozen=True)
class ImageTile:
    """A picture with its caption, as the gallery shows it."""

    id: str
    entry: CaptionedImage
    version: str  # changes when the file does
    size: Size | None  # in pixels; None if the picture cannot be used
    bucket: Size | None  # that it is cropped to
    problem: str  # why it cannot be used
    cuts: Sequence[Cut]  # encoders that truncate its caption
    seen: str  # the part of its prompt that every encoder sees
    unseen: str  # the rest
    made: bool  # whether a model wrote the caption
    masked: str  # changes when its mask does; empty if it has none


def faults_of(report: DatasetReport) -> dict[str, str]:
    """Return why pictures are not used, as a scan has found out, by name."""
    return {name: reason for name, (kind, reason) in report.files.files.items() if kind in ("damaged", "left over")}


def card_id(name: str) -> str:
    """Return a name for the page's elements about a picture."""
    return "card-" + hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:12]


def image_tiles(
    data: DataSet, entries: Sequence[CaptionedImage], faults: Mapping[str, str] | None = None
) -> list[ImageTile]:
    """Make the pictures' tiles with their captions; ``faults``: what a scan found wrong with pictures, by name."""
    prompts = [data.prompt(entry.text) if entry.text else "" for entry in entries]
    every, record = Cutter(data.config).cuts(prompts), Record(data.folder)
    tiles = []
    for entry, prompt, cuts in zip(entries, prompts, every, strict=True):
        version, size, bucket, problem, masked = "", None, None, entry.problem, ""
        try:
            if isinstance(entry, TableRow):
                if entry.content is None or entry.size is None:
                    raise UnusableImage(entry.problem)
                version, size = entry.content.version, entry.size
                masked = version if entry.content.mask else ""
            else:
                version = str(entry.file.stat().st_mtime_ns)
                size = image_size(read_regular(entry.file))
            bucket = data.source.bucket(size, data.config.model.architecture.multiple)
            scale, limit = upscaling(size, bucket), data.source.max_upscale
            if limit is not None and scale > limit:
                problem = f"is too small: it would be scaled up {scale:.1f} times; the limit is {limit:g}"
            if not isinstance(entry, TableRow):  # last: what is wrong with a mask leaves the picture to be shown
                masked = version if data.source.mask == "alpha" else data.mask(entry.file).digest[:16]
        except (UnusableImage, OSError) as reason:
            problem = str(reason)
        problem = (faults or {}).get(entry.name, problem)
        cut = min((cut.place for cut in cuts), default=len(prompt))
        made = entry.caption is not None and record.find(entry.caption) is not None
        tiles.append(
            ImageTile(
                card_id(entry.name),
                entry,
                version,
                size,
                bucket,
                problem,
                cuts,
                prompt[:cut],
                prompt[cut:],
                made,
                masked,
            )
        )
    return tiles


def select_images(
    data: DataSet, show: str, query: str, order: str = "name", report: Mapping[str, Any] | None = None
) -> list[CaptionedImage]:
    """Select the pictures that the user asked for: one of ``SHOWN``, with a text in name or caption in any case, in one
    of ``ORDERS``; all but the first need the figures of a check (``report``)."""
    entries = data.entries()
    if show == "without":
        entries = [entry for entry in entries if not entry.text]
    elif show == "unmasked":
        entries = [entry for entry in entries if _is_unmasked(data, entry)]
    elif show == "model":
        record = Record(data.folder)
        entries = [entry for entry in entries if entry.caption and record.find(entry.caption) is not None]
    elif show == "cut":
        cuts = Cutter(data.config).cuts([data.prompt(entry.text) if entry.text else "" for entry in entries])
        entries = [entry for entry, found in zip(entries, cuts, strict=True) if found]
    wanted = query.casefold()
    found = [entry for entry in entries if wanted in entry.name.casefold() or wanted in entry.text.casefold()]
    if order == "name" or not report:
        return found
    if order == "alike":
        groups = [*report.get("duplicates", []), *report.get("alike", [])]
        ranks = {name: float(rank) for rank, group in reversed(list(enumerate(groups))) for name in group}
    elif order == "cropped":
        ranks = {each["name"]: -each["cut_away"] for each in report["usable"]}
    else:
        sign = 1 if order == "small" else -1
        ranks = {each["name"]: float(sign * each["size"][0] * each["size"][1]) for each in report["usable"]}
    return sorted(found, key=lambda entry: ranks.get(entry.name, math.inf))  # stable, so by name within a rank


def _is_unmasked(data: DataSet, entry: CaptionedImage) -> bool:
    if isinstance(entry, TableRow):
        return entry.content is None or entry.content.mask is None
    try:
        return data.source.mask != "alpha" and data.mask(entry.file).found is None
    except UnusableImage:
        return True


def suggestions(roots: Roots) -> list[Path]:
    """List the folders with pictures in the roots and one level below them, and those that were uploaded."""
    found: list[Path] = []
    for root in dict.fromkeys((roots.uploads, *roots.named)):
        try:
            entries = sorted(root.iterdir())[:LOOKED_AT]
        except OSError:  # unreadable: there is nothing to suggest
            entries = []
        below = (each for each in entries if each.is_dir() and not each.is_symlink() and not each.name.startswith("."))
        found += [folder for folder in (root, *below) if folder not in found and _holds_images(folder)]
    return found[:SUGGESTED]


@dataclass(frozen=True)
class FolderLevel:
    """A folder to choose from: how many pictures it holds itself, and the folders below it."""

    path: Path | None  # None: above several roots
    name: str
    images: int = 0
    more: bool = False  # whether there are more entries than were counted
    folders: tuple[FolderLevel, ...] = ()  # each without the folders below it
    above: str | None = None  # to ask for the level above; None: there is none


def list_folders(roots: Roots, text: str) -> FolderLevel:
    """List one level of the folders in the roots; empty: the root, or all of them. Raises UserError if it is none of
    them."""
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
    images = sum(each.lower().endswith(SUFFIXES) and not each.startswith(".") for each in names)
    return FolderLevel(folder, name, images, len(names) > COUNTED)


def _holds_images(folder: Path) -> bool:
    try:
        names = (entry.name.lower() for _, entry in zip(range(LOOKED_AT), folder.iterdir(), strict=False))
        return any(name.endswith(SUFFIXES) and not name.startswith(".") for name in names)
    except OSError:
        return False
