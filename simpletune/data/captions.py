"""Captions of pictures in a folder: from text files, metadata.jsonl, or the file names."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from simpletune.data.source import Rejected, UnusablePicture
from simpletune.data.walk import OUTSIDE, SUFFIXES, Links, is_outside, is_text, read_regular
from simpletune.options import UserError

METADATA = "metadata.jsonl"
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


def txt_caption(root: Path, links: Links, file: Path) -> str:
    """The caption in the text file beside a picture.

    Raises:
        UnusablePicture: there is none that can be used.
    """
    text_file = file.with_suffix(".txt")
    if not os.path.lexists(text_file):
        raise UnusablePicture(f"has no caption: {text_file.name} is missing")
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
