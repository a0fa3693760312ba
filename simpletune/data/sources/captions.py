"""Captions of pictures in a folder, from text files, metadata.jsonl or file names."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from simpletune.data.sources.folder_names import MissingCaption
from simpletune.data.sources.source import RejectedEntry, SourceImage, UnusableImage
from simpletune.data.sources.walk import OUTSIDE, USUAL, Links, format_too_large, is_outside, is_text, read_regular
from simpletune.system.options import UserError, plural
from simpletune.system.portable import name_inside

METADATA = "metadata.jsonl"
TEXTS = (".txt", ".caption")  # extensions of caption files
MAX_BYTES = 2**20  # bytes of a caption file
WEIGHT = re.compile(r"([-+]?[.,]?\d[\d.,]*(?:e[-+]?\d+)?)\s*::\s*(.*)", re.IGNORECASE)  # that of Dynamic Prompts
MAX_WEIGHT = 1000


def validate_caption(caption: str, what: str) -> str:
    """Strip and validate a caption; ``what`` is the subject of the message, such as ``its caption 001.txt``.

    Raises:
        UnusableImage: it is empty, or contains control characters.
    """
    for place, character in enumerate(caption):  # a control character could drive a terminal
        if unicodedata.category(character) == "Cc" and not character.isspace():
            raise UnusableImage(f"{what} contains the control character U+{ord(character):04X} at {place + 1}")
    if not caption.strip():
        raise UnusableImage(f"{what} is empty")
    return caption.strip()


def one_line(caption: str) -> str:
    """Join a caption's lines with spaces; the CLIP and T5 tokenizers treat a line break as a space."""
    return " ".join(line.strip() for line in re.split("[\r\n]", caption) if line.strip())


def settle_captions(image: SourceImage, several: bool) -> SourceImage:
    """Join the lines of each caption as read, or (``several``) take each line as a caption; separate captions from
    their weights, and add up those of a caption that is there more than once.

    Raises:
        UnusableImage: a weight is wrong, or before a line that would be joined.
    """
    weights: dict[str, float] = {}
    for caption in image.captions:
        lines = [line.strip() for line in re.split("[\r\n]", caption) if line.strip()]
        if not several and len(lines) > 1:
            if any(WEIGHT.fullmatch(line) for line in lines[bool(image.more) :]):  # a text of a list has one in front
                raise UnusableImage(
                    "has lines with weights, and lines are joined into one caption. Set data.caption_lines=several"
                )
            lines = [one_line(caption)]
        for line in lines:
            weighs = len(lines) > 1 or image.more  # a caption alone has no weight
            weight, text = _split_weight(line) if weighs else (1.0, line)
            weights[text] = weights.get(text, 0) + weight
    first, *more = weights
    differ = len(set(weights.values())) > 1
    return replace(image, caption=first, more=tuple(more), weights=tuple(weights.values()) if differ else ())


def _split_weight(line: str) -> tuple[float, str]:
    """Split a caption into the weight that it begins with, or 1, and the rest."""
    found = WEIGHT.fullmatch(line)
    if found is None:
        return 1.0, line
    given, text = found.groups()
    try:
        weight = float(given)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= MAX_WEIGHT:
        raise UnusableImage(
            f"has a caption of weight {given:.20}, which is not a number above 0 and up to {MAX_WEIGHT}. Write one "
            "such as 2::a dog, or remove the caption"
        )
    if not text:
        raise UnusableImage(f"has the weight {given:.20} without a caption. Write one behind the colons, or remove it")
    return weight, text


def settle_lines(
    images: Sequence[SourceImage], described: str, several: bool
) -> tuple[list[SourceImage], list[RejectedEntry], str]:
    """Run ``settle_captions`` on all pictures, and return those that it rejects, too; adds to the description of where
    captions come from how many captions had several lines, or how many pictures have several captions."""
    settled, rejected, joined = [], [], 0
    for image in images:
        try:
            settled.append(settle_captions(image, several))
            joined += "\n" in image.caption or "\r" in image.caption
        except UnusableImage as reason:
            rejected.append(RejectedEntry(image.name, str(reason)))
    if several or any(image.more for image in settled):
        count, weighted = sum(bool(each.more) for each in settled), sum(bool(each.weights) for each in settled)
        said = f"{plural(count, 'picture')} with several captions" + (f", {weighted} with weights" if weighted else "")
        return settled, rejected, f"{described} ({said})" if count else described
    many = f" ({plural(joined, 'caption')} of several lines, joined with spaces)" if joined else ""
    return settled, rejected, described + many


def cell_captions(value: object, what: str) -> list[str]:
    """Return the captions in a cell of a table (``what``): a string, or a list of strings.

    Raises:
        UnusableImage: there is none, or one cannot be used.
    """
    values = value if isinstance(value, list) and value else [value]
    texts = [text for text in values if isinstance(text, str) and text.strip()]
    if len(texts) < len(values):
        raise UnusableImage(f"{what} is empty or not a string")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_BYTES:
        raise UnusableImage(f"{what} {format_too_large(size, MAX_BYTES)}")
    return [validate_caption(text, what) for text in texts]


def txt_caption(root: Path, links: Links, file: Path) -> tuple[str, ...]:
    """Read the caption beside a picture, NAME.txt or NAME.caption. Raises UnusableImage if none is usable, or both
    differ."""
    files = texts_beside(file)
    if not files:
        raise MissingCaption(f"has no caption: {file.with_suffix(TEXTS[0]).name} is missing")
    captions = set()
    for text_file in files:
        what = f"its caption {text_file.name}"
        if links == "inside" and text_file.is_symlink() and is_outside(text_file, root):
            raise UnusableImage(f"{what} {OUTSIDE}")
        try:
            caption = read_regular(text_file, MAX_BYTES).decode("utf-8-sig")
        except UnusableImage as reason:
            raise UnusableImage(f"{what} {reason}") from None
        except UnicodeDecodeError:
            raise UnusableImage(f"{what} is not UTF-8 text") from None
        captions.add(validate_caption(caption.replace("\r\n", "\n"), what))
    if len(captions) > 1:
        raise UnusableImage(f"has two different captions: {' and '.join(text.name for text in files)}. Keep one")
    return tuple(captions)


def texts_beside(file: Path) -> list[Path]:
    """Return the files NAME.txt and NAME.caption beside a picture."""
    return [text for suffix in TEXTS if os.path.lexists(text := file.with_suffix(suffix))]


def endings_of_texts(files: Sequence[Path]) -> list[str]:
    """Return the extensions of caption files beside pictures."""
    return [suffix for suffix in TEXTS if any(os.path.lexists(file.with_suffix(suffix)) for file in files)]


def filename_caption(file: Path) -> tuple[str, ...]:
    """Turn a file name into a caption. Raises UnusableImage if it contains no words."""
    caption = " ".join(file.stem.replace("_", " ").replace("-", " ").split())
    if not any(character.isalpha() for character in caption):
        raise UnusableImage(
            f"has no caption, and its file name has no words. Set data.prompt or add {file.with_suffix('.txt').name}"
        )
    return (validate_caption(caption, "its file name"),)


def jsonl_caption(path: Path, captions: dict[str, tuple[str, ...]], file: Path) -> tuple[str, ...]:
    """Look up a picture's captions among those of metadata.jsonl. Raises UnusableImage if none is usable."""
    name = file.relative_to(path).as_posix()
    if name not in captions:
        raise MissingCaption(f"has no line in {METADATA}")
    return tuple(validate_caption(caption, f"its text in {METADATA}") for caption in captions[name])


@dataclass
class Metadata:
    """The content of a metadata.jsonl: captions and line numbers by relative file name, and unusable lines."""

    captions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    rejected: list[RejectedEntry] = field(default_factory=list)

    def list_unmatched(self, root: Path, names: Collection[str]) -> list[RejectedEntry]:
        """List the lines that match none of the found pictures, with the reason."""
        left = []
        for name, number in self.lines.items():
            if name in names:
                continue
            there = os.path.exists(root / name)
            why = f"which is hidden or no picture ({USUAL})" if there else "which does not exist"
            left.append(RejectedEntry(f"{METADATA}:{number}", f"names {name!r}, {why}", "line"))
        return left


def read_metadata(file: Path) -> Metadata:
    """Read a metadata.jsonl (the Hugging Face imagefolder convention). Raises UserError if the file cannot be read."""
    try:
        text = read_regular(file).decode("utf-8-sig")
    except (UnusableImage, UnicodeDecodeError) as error:
        raise UserError(
            f"data.captions: {file} cannot be read as UTF-8 text ({error}). Fix the file, or set data.captions"
        ) from None
    return read_lines(text)


def read_lines(text: str, keys: Sequence[str] = ("text",)) -> Metadata:
    """Read the lines of a metadata.jsonl; a caption is in the first of these fields that a line has."""
    found = Metadata()
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold U+2028: not splitlines
        if not line.strip():
            continue
        try:
            name, texts = _read_line(line, keys)
            if name in found.captions:
                raise UnusableImage(f"repeats {name!r} from line {found.lines[name]}. Keep one")
            found.captions[name], found.lines[name] = texts, number
        except UnusableImage as reason:
            found.rejected.append(RejectedEntry(f"{METADATA}:{number}", str(reason), "line"))
    return found


def _read_line(line: str, keys: Sequence[str] = ("text",)) -> tuple[str, tuple[str, ...]]:
    """Return a line's file name, relative and normalised, and its texts. Raises UnusableImage if it cannot be used."""
    try:
        row = json.loads(line)
        name, text = row["file_name"], row[next(key for key in keys if key in row)]
    except (ValueError, KeyError, TypeError, RecursionError, StopIteration):
        raise UnusableImage(f'is not a JSON object with "file_name" and {_quote(keys)}') from None
    texts = text if isinstance(text, list) and text else [text]
    if not isinstance(name, str) or not all(isinstance(each, str) for each in texts):
        raise UnusableImage("file_name must be a string, and text a string or a list of them")
    if "\\" in name and len(keys) > 1:  # written on Windows
        name = name.replace("\\", "/")
    if not is_text("".join([name, *texts])):
        raise UnusableImage("contains a lone surrogate, which is not valid text")
    inside = name_inside(name)
    if inside is None:
        raise UnusableImage(f"file_name {name!r} is outside the folder. Use paths inside it")
    return inside, tuple(texts)


def _quote(keys: Sequence[str]) -> str:
    return " or ".join(f'"{key}"' for key in keys)
