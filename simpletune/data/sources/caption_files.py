"""Read and write the caption beside a picture; refuse to overwrite one that has changed in the meantime."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from simpletune.data.sources.captions import MAX_BYTES, TEXTS, one_line, texts_beside, validate_caption
from simpletune.data.sources.sidecars import decode_text
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import OUTSIDE, is_outside, is_text, read_regular
from simpletune.system.atomic import write_text
from simpletune.system.options import UserError
from simpletune.system.printable import STEERING


class ChangedCaption(UserError):
    """A caption file has changed since it was read."""


@dataclass(frozen=True)
class CaptionFile:
    """Caption file of a picture."""

    file: Path  # NAME.txt or NAME.caption, which need not exist
    text: str = ""  # the caption with its line breaks; empty if there is none
    digest: str = ""  # SHA-256 of the file's bytes; empty if it does not exist


def caption_file(root: Path, image: Path) -> CaptionFile:
    """Read the caption file of a picture; if there is none, return where it would be.

    Raises:
        UnusableImage: there are two files, or the only one links out of the data folder, or is not text.
    """
    found = _texts_of(image)
    if len(found) > 1:
        raise UnusableImage(f"has two caption files: {' and '.join(file.name for file in found)}. Keep one")
    if not found:
        return CaptionFile(image.with_suffix(TEXTS[0]))
    (file,) = found
    if is_outside(file, root):
        raise UnusableImage(f"its caption {file.name} {OUTSIDE}")
    data = read_regular(file, MAX_BYTES)
    try:
        text = decode_text(data)
    except UnusableImage as reason:
        raise UnusableImage(f"its caption {file.name} {reason}") from None
    return CaptionFile(file, text.replace("\r\n", "\n").strip(), sha256(data))


def _texts_of(image: Path) -> list[Path]:
    """Find the caption files of a picture: NAME.txt or NAME.caption, or if there is none, those in capital letters or
    named NAME.jpg.txt, once where the file system knows no case."""
    capital = [image.with_suffix(suffix.upper()) for suffix in TEXTS]
    whole = [image.with_name(image.name + suffix) for suffix in (*TEXTS, *map(str.upper, TEXTS))]
    return texts_beside(image) or [file for file in (*capital, *whole) if os.path.lexists(file)]


def caption_content(file: Path, caption: str) -> str:
    """Return the content of a caption's file: without surrounding space, with a line feed at its end. Raises UserError
    if the text is empty, too long, or contains control characters."""
    try:
        text = validate_caption(caption.replace("\r\n", "\n"), "the caption")
    except UnusableImage as reason:
        raise UserError(f"{file.name}: {reason}. Nothing was written") from None
    content = f"{text}\n"
    if not is_text(content) or len(content.encode()) > MAX_BYTES:
        raise UserError(f"{file.name}: the caption is longer than {MAX_BYTES:,} bytes, or not text")
    return content


def write_caption(before: CaptionFile, caption: str) -> CaptionFile:
    """Write a caption atomically.

    Args:
        before: the file as it was read.
        caption: the new text; surrounding space is dropped, and a line feed ends the file.

    Returns:
        The file as it is now.

    Raises:
        ChangedCaption: the file was changed, created or deleted since it was read; it is left unchanged.
        UserError: the text is empty, too long, or contains control characters.
    """
    content = caption_content(before.file, caption)
    now = ""
    if os.path.lexists(before.file):
        try:
            now = sha256(read_regular(before.file, MAX_BYTES))
        except UnusableImage:
            now = "unreadable"
    if now != before.digest:
        raise ChangedCaption(
            f"{before.file.name} was changed by something else since it was read, and is left unchanged. Look at it "
            "again"
        )
    write_text(before.file, content, shared=True)
    return CaptionFile(before.file, content[:-1], sha256(content.encode()))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plain_line(text: str) -> str:
    """Turn a model's text into one line: without control and direction characters, with single spaces."""
    return " ".join(one_line(STEERING.sub(" ", text)).split())
