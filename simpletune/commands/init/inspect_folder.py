"""Examine a folder of pictures: which are usable, their sizes, captions and duplicates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simpletune.commands.inspect_data.scan import DatasetReport, scan_dataset
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.captions import METADATA, endings_of_texts
from simpletune.data.sources.folder_names import meaning, naming_folder
from simpletune.data.sources.source import Picture
from simpletune.data.sources.walk import SUFFIXES, walk
from simpletune.runs.folder import METRICS, SUMMARY
from simpletune.system.options import Json, UserError, plural
from simpletune.system.printable import printable_name

Captions = Literal["texts", "metadata", "names", "none"]
WORDS = 2  # words in a file name that describes its picture
LACKS = ("has no caption", "has no line")  # how the reasons of pictures without a caption start
NAMED = 0.5  # share of the pictures whose names must have that many words
CAMERA = {
    "img", "dsc", "dscf", "dscn", "pxl", "mvi", "gopr", "dji", "photo", "photos", "image", "images", "picture", "pic",
    "pics", "screenshot", "screen", "shot", "file", "untitled", "copy", "scan", "whatsapp", "signal", "download",
    "frame", "new", "edit", "edited", "final", "resized", "crop", "cropped", "jpeg", "png", "webp", "unsplash",
}  # fmt: skip
"""Words in names that cameras and programs give."""
PLAIN = CAMERA | {
    "data", "dataset", "datasets", "train", "training", "test", "input", "instance", "subject", "concept", "style",
    "lora", "pictures", "album", "camera", "roll", "dcim", "desktop", "downloads", "documents", "tmp", "temp",
    "the", "our", "for", "and",
}  # fmt: skip
"""Words in names of folders that say nothing about the pictures."""


@dataclass(frozen=True)
class FolderContents:
    """Content of a folder."""

    folder: Path  # absolute
    captions: Captions  # where they come from; ``none``: no usable picture has one
    kohya: bool  # whether sub-folders are named like ``10_sks dog``
    report: DatasetReport  # without a limit on sizes

    @property
    def pictures(self) -> list[Picture]:
        return [seen.picture for seen in self.report.usable]

    @property
    def caption_texts(self) -> list[str]:
        """The captions of the usable pictures, in order; empty if they have none."""
        return [] if self.captions == "none" and not self.kohya else [picture.caption for picture in self.pictures]

    @property
    def uncaptioned(self) -> list[str]:
        """The pictures that are left out because they lack a caption."""
        return [each.name for each in self.report.rejected if each.reason.startswith(LACKS)]

    @property
    def kind(self) -> str | None:
        """The word of the folder's name that may be the subject's class; None unless exactly one says something."""
        words = [word for word in re.findall(r"[^\W\d_]{3,}", self.folder.name.lower()) if word not in PLAIN]
        return words[0] if len(words) == 1 else None


def inspect_folder(folder: Path) -> FolderContents:
    """Scan and decode every picture of a folder, as ``simpletune data`` does."""
    if not folder.exists():
        raise UserError(f"{folder} does not exist. Give a folder with pictures ({', '.join(SUFFIXES)})")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file. Give the folder that holds the pictures")
    if (folder / METRICS).is_file() or (folder / SUMMARY).is_file():
        raise UserError(f"{folder} is the folder of a run. Give the folder that holds your own pictures")
    folder = folder.resolve()
    found = walk(folder, "inside")
    files = found.pictures
    if not files:
        others = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.left_alone.items()))
        rejected = f" {printable_name(found.rejected[0].name)} {found.rejected[0].reason}." if found.rejected else ""
        remedy = f"It has {others}: convert them" if others else "Add some, or name another folder"
        raise UserError(f"{folder} contains no pictures ({', '.join(SUFFIXES)}).{rejected} {remedy}")
    captions = _captions(folder, files)
    kohya = captions in ("texts", "none") and all(
        meaning(naming_folder(folder, file.relative_to(folder).as_posix())) for file in files
    )
    report = _scan(folder, captions, kohya)
    if captions in ("texts", "metadata") and not kohya and not report.usable:
        captions, report = "none", _scan(folder, "none", kohya)
    if not report.usable:
        reasons = "; ".join(f"{printable_name(each.name)} {each.reason}" for each in report.rejected[:3])
        raise UserError(
            f"{folder}: none of {plural(len(files), 'picture')} can be used: {reasons}. Repair or replace them"
        )
    return FolderContents(folder, captions, kohya, report)


def _captions(folder: Path, files: Sequence[Path]) -> Captions:
    """Determine where captions could come from, by file names only."""
    if (folder / METADATA).exists():
        return "metadata"
    if endings_of_texts(files):
        return "texts"
    # Words that describe a picture have three letters or more, and are not a camera's.
    words = [re.findall(r"[^\W\d_]{3,}", file.stem) for file in files]
    named = sum(sum(word.lower() not in CAMERA for word in each) >= WORDS for each in words)
    return "names" if named >= NAMED * len(files) else "none"


def source_of(folder: Path, captions: Captions, kohya: bool) -> Json:
    """Build the ``data`` section for the captions of a folder."""
    source: Json = {"path": str(folder)}
    if kohya:
        source["folder_names"] = "kohya"
    if captions == "names":
        source["captions"] = "filename"
    return source


def _scan(folder: Path, captions: Captions, kohya: bool) -> DatasetReport:
    data = source_of(folder, captions, kohya) | {"on_error": "skip", "max_upscale": None, "resolution": 512}
    if captions == "none" and not kohya:
        data["prompt"] = "a picture"
    config: TrainConfig = validate({"name": "look", "data": data}, str(folder), needs_model=False)
    return scan_dataset(config, 0)
