"""A folder of pictures, captioned by text files, metadata.jsonl, file names or a single prompt."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from simpletune.data.sources.captions import (
    METADATA,
    TEXTS,
    endings_of_texts,
    filename_caption,
    jsonl_caption,
    read_metadata,
    settle_lines,
    txt_caption,
)
from simpletune.data.sources.folder_names import MissingCaption, explain_folder_names, hints, meaning, naming_folder
from simpletune.data.sources.masks import Kind, alpha_mask, mask_file, without_masks
from simpletune.data.sources.pictures import decoding_of, picture_size
from simpletune.data.sources.source import Picture, RejectedEntry, Scan, Source, UnusablePicture
from simpletune.data.sources.walk import OUTSIDE, SUFFIXES, Links, is_outside, is_text, read_regular, readable, walk
from simpletune.system.options import Problem, UserError

CaptionReader = Callable[[Path], tuple[str, ...]]


class Folder(Source):
    """Pictures in a folder and its subfolders."""

    source: Literal["folder"] = "folder"
    """A local folder of pictures."""
    captions: Literal["auto", "txt", "jsonl", "filename"] = "auto"
    """Source of captions when data.prompt is not set: NAME.txt or NAME.caption beside NAME.jpg, metadata.jsonl
    (file_name, text), or file names. auto uses metadata.jsonl if it exists, otherwise text files if there are any,
    otherwise file names."""
    folder_names: Literal["plain", "kohya"] = "plain"
    """Meaning of sub-folders' names. plain: none; kohya: 10_sks dog repeats its pictures 10 times, beside data.repeats,
    and captions those without a caption "sks dog"."""
    mask: Kind | None = None
    """Learn only, or mostly, from parts of the pictures (masked training). alpha: from their opaque parts; files: from
    the white parts of a mask of each picture; null: from all of them."""
    mask_path: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the masks, which have the names of the pictures (conditioning_data_dir); null: beside each NAME.jpg its
    mask NAME-masklabel.png."""
    links: Links = "inside"
    """Follow only symbolic links to targets inside the folder, or all of them, including linked folders."""

    def problems(self, path: Path) -> Iterator[Problem]:
        """Check the folder without opening a picture."""
        if not path.exists():
            place = "" if path.is_absolute() else f" in {Path.cwd()}"
            yield Problem("data.path", f"{self.path} does not exist{place}. Give a folder with pictures")
        elif not path.is_dir():
            yield Problem("data.path", f"{self.path} is a file. Give the folder that holds the pictures")
        else:
            found = walk(path, self.links)
            if not found.pictures and not found.rejected:
                yield Problem("data.path", f"{self.path} contains no pictures ({', '.join(SUFFIXES)}). Add some")
        if self.mask_path is not None and self.mask != "files":
            yield Problem("data.mask_path", f"{self.mask_path} is not read. Set data.mask=files, or remove it")
        elif self.mask_path is not None and not Path(self.mask_path).is_dir():
            yield Problem("data.mask_path", f"{self.mask_path} is not a folder. Give the folder of the masks")

    def scan(self, path: Path) -> Scan:
        """As for ``Source``. UserError: metadata.jsonl cannot be read."""
        found = walk(path, self.links)
        files, said = without_masks(found.pictures, self.mask, self.mask_path)
        caption_of, described, rejected = self.caption_reader(path, files)
        rejected += found.rejected
        pictures = []
        for file in files:
            try:
                pictures.append(self._picture(path, file, caption_of))
            except UnusablePicture as reason:
                rejected.append(RejectedEntry(readable(file.relative_to(path).as_posix()), str(reason)))
        if self.prompt is None:
            pictures, unsettled, described = settle_lines(pictures, described, self.caption_lines == "several")
            rejected += unsettled
        names = [picture.name for picture in pictures]
        if self.folder_names == "kohya":
            notes = explain_folder_names(path, names)
        else:
            notes, said = [], [*said, *(hints(path, names) if self.repeats == 1 else ())]
        return Scan(pictures, rejected, described, dict(found.left_alone), tuple(said), tuple(notes))

    def caption_reader(self, path: Path, files: list[Path]) -> tuple[CaptionReader, str, list[RejectedEntry]]:
        """A function from file to captions, a description of where captions come from, and rejected lines."""
        prompt, kind = self.prompt, self.captions
        reader: CaptionReader
        rejected: list[RejectedEntry] = []
        if prompt is not None:
            return (lambda file: (prompt,)), f"one prompt for all pictures: {prompt!r}", []
        if kind == "auto":
            has_texts = bool(endings_of_texts(files)) or self.folder_names == "kohya"
            kind = "jsonl" if os.path.lexists(path / METADATA) else "txt" if has_texts else "filename"
        if kind == "jsonl":
            if self.links == "inside" and is_outside(path / METADATA, path):
                raise UserError(f"data.captions: {path / METADATA} {OUTSIDE}")
            metadata = read_metadata(path / METADATA)
            names = {file.relative_to(path).as_posix() for file in files}
            rejected = [*metadata.rejected, *metadata.unmatched(path, names)]
            reader, described = partial(jsonl_caption, path, metadata.captions), METADATA
        elif kind == "txt":
            endings = " and ".join(endings_of_texts(files)) or TEXTS[0]
            reader, described = partial(txt_caption, path, self.links), f"{endings} files beside the pictures"
        else:
            missing = f"no {METADATA}, no {' or '.join(TEXTS)} files, no data.prompt"
            reader, described = filename_caption, f"the file names ({missing})"
        if self.folder_names == "kohya":
            described += ", else the words of the folders' names"
        return reader, described, rejected

    def _picture(self, path: Path, file: Path, caption_of: CaptionReader) -> Picture:
        """Read one picture. Its size and digest come from the same read."""
        name = file.relative_to(path).as_posix()
        if not is_text(name):
            raise UnusablePicture("its file name is not UTF-8 text. Rename it")
        known = meaning(naming_folder(path, name)) if self.folder_names == "kohya" else None
        repeats, words = (1, "") if known is None else known
        try:
            first, *more = caption_of(file)
        except MissingCaption:
            if known is None:
                raise
            first, more = words, []
        read = partial(read_regular, file)
        data = read()
        size, digest = picture_size(data), hashlib.sha256(data).hexdigest()
        mask = None
        if self.mask == "files":
            mask = mask_file(path, self.mask_path, self.links, file, size)
        elif self.mask == "alpha":
            mask = alpha_mask(data, digest, read)
        decoding = decoding_of(data, self.background)
        return Picture(name, first, size, digest, read, more=tuple(more), repeats=repeats, mask=mask, decoding=decoding)
