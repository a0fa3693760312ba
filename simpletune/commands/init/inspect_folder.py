"""Examine a folder of pictures: which are usable, their sizes, captions and duplicates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from simpletune.commands.inspect_data.scan import DatasetReport, scan_dataset
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.clip_words import is_clip_word
from simpletune.data.sources.captions import filename_caption
from simpletune.data.sources.folder import split_names
from simpletune.data.sources.folder_names import meaning, naming_folder
from simpletune.data.sources.image_files import image_size
from simpletune.data.sources.masks import FoundMasks, find_masks
from simpletune.data.sources.sidecars import NO_IMAGE, SECOND, UNUSED
from simpletune.data.sources.source import RejectedEntry, SourceImage, UnusableImage
from simpletune.data.sources.table import SUFFIXES as TABLES
from simpletune.data.sources.walk import SUFFIXES, USUAL, read_regular, walk
from simpletune.runs.folder import METRICS, SUMMARY
from simpletune.system.options import Json, UserError, join_names, plural
from simpletune.system.printable import printable_name
from simpletune.system.shell import quote_command

Captions = Literal["files", "names", "none"]
WORDS = 2  # words in a file name that describes its picture
FEWEST = 2  # texts without a picture, and for half of the pictures without a caption, that look like misnamed captions
NAMED = 0.5  # share of the pictures whose names must have that many words
OF_CAPTIONS = (
    "its caption",
    "its text",
    "its entry",
    "has two different captions",
    "has a caption of",
    "has lines",
    "has the weight",
    "has no caption",
)
"""How the reasons begin for which a picture's captions cannot be used."""
MISSING = "a picture"  # stands for the prompt of pictures without a caption while a folder is looked at
SHARDS = (".tar", ".tgz", ".mds")
CAMERA = {
    "img", "dsc", "dscf", "dscn", "pxl", "mvi", "gopr", "dji", "photo", "photos", "image", "images", "picture", "pic",
    "pics", "screenshot", "screen", "shot", "file", "untitled", "copy", "scan", "whatsapp", "signal", "download",
    "frame", "new", "edit", "edited", "final", "resized", "crop", "cropped", "jpeg", "png", "webp", "unsplash",
}  # fmt: skip
"""Words in names that cameras and programs give."""
PLAIN = CAMERA | {
    "data", "dataset", "datasets", "train", "training", "test", "input", "instance", "subject", "concept", "style",
    "lora", "pictures", "album", "camera", "roll", "dcim", "desktop", "downloads", "documents", "tmp", "temp",
    "the", "our", "for", "and", "img", "imgs", "image", "mask", "masks", "masked", "reg", "new", "raw", "all",
}  # fmt: skip
"""Words in names of folders that say nothing about the pictures."""


@dataclass(frozen=True)
class FolderContents:
    """Content of a folder."""

    folder: Path  # absolute
    captions: Captions  # where they come from; ``none``: no picture has one
    kohya: bool  # whether sub-folders are named like ``10_sks dog``
    report: DatasetReport  # without a limit on sizes
    masks: FoundMasks
    other_masks: tuple[str, ...] = ()  # names of the pictures whose masks have another size
    splits: Mapping[str, int] | None = None  # pictures by split, unless one was chosen; only ``train`` is used
    named: tuple[str, ...] = ()  # folders named as for sd-scripts (10_sks dog) deeper than their names are read

    @property
    def images(self) -> list[SourceImage]:
        return [seen.image for seen in self.report.usable]

    @cached_property
    def own_captions(self) -> list[str]:
        """The captions of the usable pictures that have one, in order."""
        if self.captions == "none" and not self.kohya:
            return []
        return [image.caption for image in self.images if not image.as_it_is]

    @property
    def lacking(self) -> list[str]:
        """The pictures without a caption, beside others that have one."""
        return [image.name for image in self.images if image.as_it_is] if self.captions == "files" else []

    @property
    def refused(self) -> list[RejectedEntry]:
        """The pictures and lines whose captions cannot be used."""
        return [each for each in self.report.rejected if each.kind == "line" or each.reason.startswith(OF_CAPTIONS)]

    @property
    def unread(self) -> list[tuple[str, str]]:
        """Files that may hold captions and are not read, and why."""
        left = [(name, why) for name, (kind, why) in self.report.files.files.items() if kind == "left over"]
        texts = [each for each in left if each[1] == NO_IMAGE]
        bare = len(self.images) - len(self.own_captions)
        misnamed = texts if len(texts) >= max(FEWEST, bare / 2) else []  # fewer: a note, a licence
        return [*(each for each in left if _may_hold(*each)), *misnamed]

    @cached_property
    def lost_masks(self) -> list[Path]:
        """The masks that training does not find."""
        return self.masks.list_lost(self.folder)

    @property
    def words(self) -> list[str]:
        """The words of the folder's name that may be the subject's class."""
        return [word for word in re.findall(r"[^\W\d_]{3,}", self.folder.name.lower()) if word not in PLAIN]

    @property
    def kind(self) -> str | None:
        """The subject's class, if the folder's name is one word that CLIP knows; None: it must be asked."""
        words = self.words
        return words[0] if len(words) == 1 and is_clip_word(words[0]) else None


def _may_hold(name: str, why: str) -> bool:
    return not name.endswith("/") and not name.lower().endswith(SUFFIXES) and why not in (NO_IMAGE, SECOND, UNUSED)


def inspect_folder(folder: Path, chosen: Json | None = None) -> FolderContents:
    """Scan and decode every picture of a folder, as ``simpletune data`` does. ``chosen``: fields of ``data`` that the
    user has set."""
    chosen = chosen or {}
    if not folder.exists():
        raise UserError(f"{folder} does not exist. Give a folder with pictures ({USUAL})")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file. Give the folder that holds the pictures")
    if (folder / METRICS).is_file() or (folder / SUMMARY).is_file():
        raise UserError(f"{folder} is the folder of a run. Give the folder that holds your own pictures")
    folder = folder.resolve()
    found = walk(folder, chosen.get("links", "inside"), chosen.get("reading", "any"))
    if not found.images:
        others = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.left_alone.items()))
        rejected = f" {printable_name(found.rejected[0].name)} {found.rejected[0].reason}." if found.rejected else ""
        remedy = f"It has {others}: convert them" if others else "Add some, or name another folder"
        for source, endings in (("table", TABLES), ("stream", SHARDS)):
            if any(file.name.lower().endswith(endings) for file in found.others):
                kinds = "tables of pictures" if source == "table" else "shards"
                command = quote_command("simpletune", "train", "CONFIG", f"data.source={source}", f"data.path={folder}")
                remedy = f"It holds {kinds}: {command} trains on them"
        raise UserError(f"{folder} contains no pictures ({USUAL}).{rejected} {remedy}")
    by_split = split_names(folder, found.images)
    data: Json = {"split": "train"} if "train" in by_split and "split" not in chosen else {}
    files = by_split["train"] if data else found.images
    masks = find_masks(files)
    if not masks.images:
        raise UserError(f"{folder} holds {plural(len(masks.aside), 'mask')} and no pictures. Add the pictures")
    names = [file.relative_to(folder).as_posix() for file in masks.images]
    kohya = all(meaning(naming_folder(folder, name)) for name in names) and chosen.get("folder_names") != "plain"
    captions: Captions = "none" if "prompt" in chosen else "files"
    report = _scan(folder, captions, kohya, {**data, **chosen})
    seen = FolderContents(folder, captions, kohya, report, masks)
    if captions == "files" and not seen.own_captions:
        captions = "names" if not seen.refused and not seen.unread and _names_are_descriptive(masks.images) else "none"
        if captions == "names":
            _take_names(report)
        elif seen.refused:  # the pictures may be used without their captions
            with_prompt = _scan(folder, captions, kohya, {**data, **chosen})
            report.usable, report.rejected = with_prompt.usable, [*report.rejected, *with_prompt.rejected]
    if not report.usable:
        reasons = "; ".join(f"{printable_name(each.name)} {each.reason}" for each in report.rejected[:3])
        raise UserError(
            f"{folder}: none of {plural(len(files), 'picture')} can be used: {reasons}. Repair or replace them"
        )
    splits = {name: len(each) for name, each in by_split.items()} if "split" not in chosen else None
    named = () if kohya else _deeper_folders(names)
    return FolderContents(folder, captions, kohya, report, masks, tuple(_other_sizes(seen, masks)), splits, named)


def _deeper_folders(names: Sequence[str]) -> tuple[str, ...]:
    """List the folders of pictures, below the first ones, that are named as for sd-scripts, if most pictures lie in
    some."""
    places = [name.split("/")[:-1] for name in names]
    found = ["/".join(parts) for parts in places if len(parts) > 1 and meaning(parts[-1])]
    return tuple(dict.fromkeys(found)) if 2 * len(found) > len(names) else ()


def _other_sizes(seen: FolderContents, masks: FoundMasks) -> list[str]:
    """List the names of the pictures whose masks have another size, or cannot be read."""
    sizes = {seen.folder / image.name: image.size for image in seen.images}
    other = []
    for image, mask in masks.masks.items():
        try:
            same = image not in sizes or image_size(read_regular(mask)) == sizes[image]
        except UnusableImage:
            same = False
        other += [] if same else [image.relative_to(seen.folder).as_posix()]
    return other


def _take_names(report: DatasetReport) -> None:
    """Caption the pictures by their file names."""
    usable, unnamed = [], []
    for seen in report.usable:
        try:
            (caption,) = filename_caption(Path(seen.image.name))
            usable.append(replace(seen, image=replace(seen.image, caption=caption, as_it_is=False)))
        except UnusableImage as reason:
            unnamed.append(RejectedEntry(seen.image.name, str(reason)))
    report.usable, report.captions = usable, "the file names"
    report.rejected += unnamed
    report.files = report.files.with_class("left over", ((each.name, each.reason) for each in unnamed))


def _names_are_descriptive(files: Sequence[Path]) -> bool:
    """Return whether names of pictures describe them: with words of three letters or more that are not a camera's."""
    words = [re.findall(r"[^\W\d_]{3,}", file.stem) for file in files]
    named = sum(sum(word.lower() not in CAMERA for word in each) >= WORDS for each in words)
    return named >= NAMED * len(files)


def source_of(seen: FolderContents) -> Json:
    """Build the ``data`` section for a folder."""
    source: Json = {"path": str(seen.folder), "reading": "any"}
    if seen.kohya:
        source["folder_names"] = "kohya"
    if seen.captions == "names":
        source["captions"] = "filename"
    if seen.splits and "train" in seen.splits:
        source["split"] = "train"
    return source


def describe_refused(seen: FolderContents) -> str:
    """Say why captions cannot be used: the first reason, and of how many files."""
    return _first_of([(each.name, each.reason) for each in seen.refused] or seen.unread)


def describe_unread(seen: FolderContents) -> str:
    """Say why files that may hold captions are not read: the first reason, and of how many files."""
    return _first_of(seen.unread)


def _first_of(reasons: Sequence[tuple[str, str]]) -> str:
    name, reason = reasons[0]
    more = f", and {plural(len(reasons) - 1, 'other')}" if len(reasons) > 1 else ""
    return f"{printable_name(name)}: {reason}{more}"


def describe_splits(splits: Mapping[str, int]) -> str:
    """Describe what is left out because it is of another split."""
    others = [f"{name} ({plural(count, 'picture')})" for name, count in splits.items() if name != "train"]
    return f"{join_names(others)} left out, as for a data set on the hub: data.split=null trains on all"


def _scan(folder: Path, captions: Captions, kohya: bool, chosen: Json) -> DatasetReport:
    data = {"path": str(folder), "reading": "any", "on_error": "skip", "max_upscale": None, "resolution": 512}
    data |= {"folder_names": "kohya"} if kohya else {}
    if captions == "files":
        data["missing_prompt"] = None if kohya else MISSING
    elif not kohya:
        data["prompt"] = MISSING
    config: TrainConfig = validate({"name": "look", "data": data | chosen}, str(folder), needs_model=False)
    return scan_dataset(config, 0)
