"""The files of a data folder: which are pictures, which links are followed, and reading them."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from simpletune.data.source import Rejected, UnusablePicture

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
OTHER_PICTURES = (".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".psd", ".svg", ".cr2", ".nef")
MAX_BYTES = 2**30  # of one picture's file
LONGEST_NAME = 120  # characters of a name in a message
BIDIRECTIONAL = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they reorder what stands around them

Links = Literal["inside", "anywhere"]


@dataclass
class FoundFiles:
    """What a walk through a data folder found.

    Args:
        pictures: files with a picture's ending, sorted by their relative names; dangling links among them.
        rejected: links and folders that are not entered.
        left_alone: pictures of other formats, counted by ending.
    """

    pictures: list[Path] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    left_alone: Counter[str] = field(default_factory=Counter)


def is_outside(path: str | Path, root: str | Path) -> bool:
    """Whether a path, links resolved, lies outside of a folder."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


OUTSIDE = "is a symbolic link that leads out of the data folder. Copy the file there, or set data.links=anywhere"


def walk(root: Path, links: Links) -> FoundFiles:
    """The picture files below a folder; hidden files and folders are left out.

    Linked folders are entered only with ``anywhere``, after all others and each real folder once: no cycle is endless.

    Args:
        root: the data folder.
        links: which symbolic links may be followed.
    """
    found, seen = FoundFiles(), set[str]()
    waiting, linked = [os.fspath(root)], list[str]()
    while waiting or linked:
        folder = waiting.pop() if waiting else linked.pop(0)
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        for entry in _entries(folder, root, found):
            if _is_folder(entry):
                (linked if entry.is_symlink() else waiting).append(entry.path)
            else:
                _take_file(entry, root, links, found)
        if links == "inside":
            outside = [path for path in linked if is_outside(path, root)]
            found.rejected += [Rejected(_relative(path, root), OUTSIDE, "folder") for path in outside]
            linked = []
    found.pictures.sort(key=lambda file: file.relative_to(root).as_posix())
    return found


def _entries(folder: str, root: Path, found: FoundFiles) -> Iterator[os.DirEntry[str]]:
    """What is in a folder and not hidden."""
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        name = _relative(folder, root) if folder != os.fspath(root) else "."
        found.rejected.append(Rejected(name, f"cannot be read ({error.strerror or error})", "folder"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: reading it says so
        return False


def _take_file(entry: os.DirEntry[str], root: Path, links: Links, found: FoundFiles) -> None:
    suffix = os.path.splitext(entry.name)[1].lower()
    if suffix in OTHER_PICTURES:
        found.left_alone[suffix] += 1
    if suffix not in SUFFIXES:
        return
    if links == "inside" and entry.is_symlink() and is_outside(entry.path, root):
        found.rejected.append(Rejected(_relative(entry.path, root), OUTSIDE))
    else:
        found.pictures.append(Path(entry.path))


def _relative(path: str, root: Path) -> str:
    return readable(Path(path).relative_to(root).as_posix())


def read_regular(file: str | Path, limit: int = MAX_BYTES) -> bytes:
    """A file's bytes; a pipe or a device would never end.

    Raises:
        UnusablePicture: it cannot be read, is no regular file, or is larger than any should be.
    """
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnusablePicture("is not a regular file")
            if status.st_size > limit:
                raise UnusablePicture(f"has {status.st_size:,} bytes; the most is {limit:,}")
            return stream.read()
    except OSError as error:
        raise UnusablePicture(f"cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise UnusablePicture("cannot be read (no file has such a name)") from None


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8: lone surrogates (of file names in other encodings) cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(name: str) -> str:
    """A name as UTF-8 text; what is none in it becomes question marks."""
    return name.encode("utf-8", "replace").decode()


def printable(name: str) -> str:
    """A name or a text as it can stand in one line of a terminal: line breaks and other control characters escaped, the
    middle of a very long one left out."""
    cut = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}...{name[-LONGEST_NAME // 2 + 3 :]}"
    return "".join(
        character.encode("unicode_escape").decode() if _unsafe(character) else character for character in cut
    )


def _unsafe(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in BIDIRECTIONAL
