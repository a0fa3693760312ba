"""A folder of pictures, captioned by text files, by metadata.jsonl, by the file names, or by one prompt."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from simpletune.data.captions import METADATA, filename_caption, jsonl_caption, read_metadata, txt_caption
from simpletune.data.pictures import picture_size
from simpletune.data.source import Picture, Rejected, Scan, Source, UnusablePicture
from simpletune.data.walk import OUTSIDE, SUFFIXES, Links, is_outside, is_text, read_regular, readable, walk
from simpletune.options import Problem, UserError


class Folder(Source):
    """Pictures in a folder and its sub-folders (jpg, jpeg, png, webp)."""

    source: Literal["folder"] = "folder"
    """A local folder of pictures."""
    captions: Literal["auto", "txt", "jsonl", "filename"] = "auto"
    """Where captions come from when there is no prompt: NAME.txt beside NAME.jpg, metadata.jsonl (file_name, text), or
    the file names; auto takes metadata.jsonl if there is one, else .txt files if there are any, else file names."""
    links: Links = "inside"
    """Which symbolic links are followed: those that stay in the folder, or all of them, linked folders too."""

    def problems(self, path: Path) -> Iterator[Problem]:
        """What can be said about the folder without opening a picture.

        Args:
            path: the folder, with ``demo:`` names resolved.
        """
        if not path.exists():
            yield Problem("data.path", f"{self.path} does not exist. Give a folder with pictures")
        elif not path.is_dir():
            yield Problem("data.path", f"{self.path} is a file. Give the folder that holds the pictures")
        else:
            found = walk(path, self.links)
            if not found.pictures and not found.rejected:
                yield Problem("data.path", f"{self.path} holds no picture ({', '.join(SUFFIXES)}). Put some there")

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
        return Scan(pictures, rejected, described, dict(found.left_alone))

    def _caption_reader(self, path: Path, files: list[Path]) -> tuple[Callable[[Path], str], str, list[Rejected]]:
        """The function that gives a file's caption, where captions come from in words, and the lines left out."""
        prompt = self.prompt
        if prompt is not None:
            return (lambda file: prompt), f"one prompt for all: {prompt!r}", []
        kind = self.captions
        if kind == "auto":
            has_txt = any(os.path.lexists(file.with_suffix(".txt")) for file in files)
            kind = "jsonl" if os.path.lexists(path / METADATA) else "txt" if has_txt else "filename"
        if kind == "jsonl":
            if self.links == "inside" and is_outside(path / METADATA, path):
                raise UserError(f"data.captions: {path / METADATA} {OUTSIDE}")
            metadata = read_metadata(path / METADATA)
            names = {file.relative_to(path).as_posix() for file in files}
            rejected = [*metadata.rejected, *metadata.unmatched(path, names)]
            return partial(jsonl_caption, path, metadata.captions), METADATA, rejected
        if kind == "txt":
            return partial(txt_caption, path, self.links), ".txt files beside the pictures", []
        return filename_caption, f"the file names (no {METADATA}, no .txt files, no data.prompt)", []


def _picture(path: Path, file: Path, caption_of: Callable[[Path], str]) -> Picture:
    """One picture: its size and digest are of the same bytes."""
    name = file.relative_to(path).as_posix()
    if not is_text(name):
        raise UnusablePicture("its file name is not UTF-8 text. Rename it")
    caption = caption_of(file)
    data = read_regular(file)
    return Picture(name, caption, picture_size(data), hashlib.sha256(data).hexdigest(), partial(read_regular, file))
