"""A folder of pictures, captioned by text files, metadata.jsonl, file names or a single prompt."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from simpletune.data.captions import (
    METADATA,
    TEXTS,
    endings_of_texts,
    filename_caption,
    join_lines,
    jsonl_caption,
    read_metadata,
    txt_caption,
)
from simpletune.data.pictures import picture_size
from simpletune.data.source import Picture, Rejected, Scan, Source, UnusablePicture
from simpletune.data.walk import OUTSIDE, SUFFIXES, Links, is_outside, is_text, printable, read_regular, readable, walk
from simpletune.options import Problem, UserError, shortened

KOHYA = re.compile(r"(\d{1,3})_.")  # matches 10_dog, not 2024_holiday


class Folder(Source):
    """Pictures in a folder and its subfolders (jpg, jpeg, png, webp)."""

    source: Literal["folder"] = "folder"
    """A local folder of pictures."""
    captions: Literal["auto", "txt", "jsonl", "filename"] = "auto"
    """Source of captions when data.prompt is not set: NAME.txt or NAME.caption beside NAME.jpg, metadata.jsonl
    (file_name, text), or file names. auto uses metadata.jsonl if it exists, otherwise text files if there are any,
    otherwise file names. The lines of a caption are joined with spaces."""
    links: Links = "inside"
    """Follow only symbolic links to targets inside the folder, or all of them, including linked folders."""

    def problems(self, path: Path) -> Iterator[Problem]:
        """Check the folder without opening a picture.

        Args:
            path: the folder, with ``demo:`` names resolved.
        """
        if not path.exists():
            place = "" if path.is_absolute() else f" in {Path.cwd()}"
            yield Problem("data.path", f"{self.path} does not exist{place}. Give a folder with pictures")
        elif not path.is_dir():
            yield Problem("data.path", f"{self.path} is a file. Give the folder that holds the pictures")
        else:
            found = walk(path, self.links)
            if not found.pictures and not found.rejected:
                yield Problem("data.path", f"{self.path} contains no pictures ({', '.join(SUFFIXES)}). Add some")

    def scan(self, path: Path) -> Scan:
        """Find the pictures and their captions.

        Args:
            path: the folder, with ``demo:`` names resolved.

        Raises:
            UserError: metadata.jsonl cannot be read.
        """
        found = walk(path, self.links)
        caption_of, described, rejected = self._caption_reader(path, found.pictures)
        rejected += found.rejected
        pictures = []
        for file in found.pictures:
            try:
                pictures.append(_picture(path, file, caption_of))
            except UnusablePicture as reason:
                rejected.append(Rejected(readable(file.relative_to(path).as_posix()), str(reason)))
        if self.prompt is None:
            pictures, described = join_lines(pictures, described)
        hints = () if self.repeats > 1 else tuple(repeats_in_names(path, [picture.name for picture in pictures]))
        return Scan(pictures, rejected, described, dict(found.left_alone), hints)

    def _caption_reader(self, path: Path, files: list[Path]) -> tuple[Callable[[Path], str], str, list[Rejected]]:
        """Return a function from file to caption, a description of where captions come from, and rejected lines."""
        prompt = self.prompt
        if prompt is not None:
            return (lambda file: prompt), f"one prompt for all pictures: {prompt!r}", []
        kind = self.captions
        if kind == "auto":
            has_texts = bool(endings_of_texts(files))
            kind = "jsonl" if os.path.lexists(path / METADATA) else "txt" if has_texts else "filename"
        if kind == "jsonl":
            if self.links == "inside" and is_outside(path / METADATA, path):
                raise UserError(f"data.captions: {path / METADATA} {OUTSIDE}")
            metadata = read_metadata(path / METADATA)
            names = {file.relative_to(path).as_posix() for file in files}
            rejected = [*metadata.rejected, *metadata.unmatched(path, names)]
            return partial(jsonl_caption, path, metadata.captions), METADATA, rejected
        if kind == "txt":
            endings = " and ".join(endings_of_texts(files)) or TEXTS[0]
            return partial(txt_caption, path, self.links), f"{endings} files beside the pictures", []
        return filename_caption, f"the file names (no {METADATA}, no {' or '.join(TEXTS)} files, no data.prompt)", []


def repeats_in_names(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Hint at ``data.repeats`` if folders are named as for kohya's scripts, where 10_dog means 10 repeats.

    Args:
        root: the data folder.
        names: names of its pictures.
    """
    folders = dict.fromkeys([root.name, *(name.split("/")[0] for name in names if "/" in name)])
    numbers = {folder: int(match[1]) for folder in folders if (match := KOHYA.match(folder)) and 1 < int(match[1])}
    if not numbers:
        return
    listed, different = printable(shortened(list(numbers), 3)), sorted(set(numbers.values()))
    one = f"Set data.repeats={different[0]} to train on every picture {different[0]} times an epoch"
    several = "Set data.repeats=N to train on every picture N times an epoch; it applies to all folders"
    yield (
        f"{listed}: unlike kohya's scripts, simpletune ignores the repeat count in a folder's name. "
        f"{one if len(different) == 1 else several}"
    )


def _picture(path: Path, file: Path, caption_of: Callable[[Path], str]) -> Picture:
    """Read one picture. Its size and digest come from the same read."""
    name = file.relative_to(path).as_posix()
    if not is_text(name):
        raise UnusablePicture("its file name is not UTF-8 text. Rename it")
    caption = caption_of(file)
    data = read_regular(file)
    return Picture(name, caption, picture_size(data), hashlib.sha256(data).hexdigest(), partial(read_regular, file))
