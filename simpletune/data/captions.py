"""Captions of pictures in a folder: from text files, metadata.jsonl, or the file names."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from simpletune.data.source import Picture, Rejected, UnusablePicture
from simpletune.data.walk import OUTSIDE, SUFFIXES, Links, is_outside, is_text, read_regular
from simpletune.options import UserError, plural

METADATA = "metadata.jsonl"
TEXTS = (".txt", ".caption")  # endings of captions' files
MAX_BYTES = 2**20  # of a caption's file


def checked(caption: str, what: str) -> str:
    """A caption without the space around it.

    Args:
        caption: as it was read.
        what: where it stands, as the beginning of a sentence.

    Raises:
        UnusablePicture: it is empty, or holds characters that no prompt has and that could steer a terminal.
    """
    for place, character in enumerate(caption):
        if unicodedata.category(character) == "Cc" and not character.isspace():
            raise UnusablePicture(f"{what} holds the control character U+{ord(character):04X} at place {place + 1}")
    if not caption.strip():
        raise UnusablePicture(f"{what} is empty")
    return caption.strip()


def one_line(caption: str) -> str:
    """A caption with its lines joined by spaces: to CLIP and T5 a line break is a space."""
    return " ".join(line.strip() for line in re.split("[\r\n]", caption) if line.strip())


def join_lines(pictures: Sequence[Picture], described: str) -> tuple[list[Picture], str]:
    """The pictures with one-line captions, and where captions come from, with how many had several lines."""
    joined = [replace(picture, caption=one_line(picture.caption)) for picture in pictures]
    count = sum(new.caption != old.caption for new, old in zip(joined, pictures, strict=True))
    many = f" ({plural(count, 'caption')} of several lines, joined by spaces)" if count else ""
    return joined, described + many


def txt_caption(root: Path, links: Links, file: Path) -> str:
    """The caption in the text file beside a picture, NAME.txt or NAME.caption.

    Raises:
        UnusablePicture: there is none that can be used, or there are two that differ.
    """
    files = [text for suffix in TEXTS if os.path.lexists(text := file.with_suffix(suffix))]
    if not files:
        raise UnusablePicture(f"has no caption: {file.with_suffix(TEXTS[0]).name} is missing")
    captions = [_read_text(root, links, text_file) for text_file in files]
    if len(set(captions)) > 1:
        raise UnusablePicture(f"has two captions that differ: {' and '.join(text.name for text in files)}. Keep one")
    return captions[0]


def endings_of_texts(files: Sequence[Path]) -> list[str]:
    """Which endings the captions' files beside some pictures have."""
    return [suffix for suffix in TEXTS if any(os.path.lexists(file.with_suffix(suffix)) for file in files)]


def _read_text(root: Path, links: Links, text_file: Path) -> str:
    what = f"its caption {text_file.name}"
    if links == "inside" and text_file.is_symlink() and is_outside(text_file, root):
        raise UnusablePicture(f"{what} {OUTSIDE}")
    try:
        caption = read_regular(text_file, MAX_BYTES).decode("utf-8-sig")
    except UnusablePicture as reason:
        raise UnusablePicture(f"{what} {reason}") from None
    except UnicodeDecodeError:
        raise UnusablePicture(f"{what} is not UTF-8 text") from None
    return checked(caption.replace("\r\n", "\n"), what)


def filename_caption(file: Path) -> str:
    """A file's name as its caption.

    Raises:
        UnusablePicture: it has no words.
    """
    caption = " ".join(file.stem.replace("_", " ").replace("-", " ").split())
    if not any(character.isalpha() for character in caption):
        raise UnusablePicture(
            f"has no caption, and its file name has no words. Set data.prompt, or write {file.with_suffix('.txt').name}"
        )
    return checked(caption, "its file name")


def jsonl_caption(path: Path, captions: dict[str, str], file: Path) -> str:
    """A picture's caption in metadata.jsonl.

    Raises:
        UnusablePicture: there is none that can be used.
    """
    name = file.relative_to(path).as_posix()
    if name not in captions:
        raise UnusablePicture(f"has no line in {METADATA}")
    return checked(captions[name], f"its text in {METADATA}")


@dataclass
class Metadata:
    """What a metadata.jsonl says.

    Args:
        captions: by relative file name.
        lines: the number of each name's line.
        rejected: lines that cannot be used.
    """

    captions: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)

    def refuse(self, number: int, reason: str) -> None:
        """Leave a line out."""
        self.rejected.append(Rejected(f"{METADATA}:{number}", reason, "line"))

    def unmatched(self, root: Path, names: Collection[str]) -> list[Rejected]:
        """The lines that name no picture which was found, with the reason."""
        left = []
        for name, number in self.lines.items():
            if name in names:
                continue
            there = os.path.exists(root / name)
            why = f"which is no {', '.join(SUFFIXES)} file, or hidden" if there else "and there is no such file"
            left.append(Rejected(f"{METADATA}:{number}", f"names {name!r}, {why}", "line"))
        return left


def read_metadata(file: Path) -> Metadata:
    """Read a metadata.jsonl (the Hugging Face imagefolder convention).

    A line is left out, with its number, where it is not a JSON object with ``file_name`` and ``text``, names a file
    outside the folder, or a file twice (the first line holds).

    Raises:
        UserError: the file as a whole cannot be read.
    """
    try:
        text = read_regular(file).decode("utf-8-sig")
    except (UnusablePicture, UnicodeDecodeError) as error:
        raise UserError(f"data.captions: {file} cannot be read as UTF-8 text ({error}). It is needed here") from None
    found = Metadata()
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold U+2028: not splitlines
        if line.strip():
            _read_line(line, number, found)
    return found


def _read_line(line: str, number: int, found: Metadata) -> None:
    try:
        row = json.loads(line)
        name, text = row["file_name"], row["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return found.refuse(number, 'is not a JSON object with "file_name" and "text"')
    if not isinstance(name, str) or not isinstance(text, str):
        return found.refuse(number, "file_name and text must be strings")
    if not is_text(name + text):
        return found.refuse(number, "holds half of a surrogate pair, which is no text")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return found.refuse(number, f"file_name {name!r} leads out of the folder. Use paths inside it")
    name = path.as_posix()
    if name in found.captions:
        return found.refuse(number, f"{name!r} has line {found.lines[name]} already. Keep one")
    found.captions[name], found.lines[name] = text, number
