"""Walk a data folder: find picture files, follow symbolic links safely, and read files."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from simpletune.data.sources.source import RejectedEntry, UnusablePicture
from simpletune.system import regular_files

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".gif", ".heic", ".heif", ".tif", ".tiff")
OTHER_PICTURES = (".jxl", ".psd", ".svg", ".cr2", ".nef")
MAX_BYTES = 2**30  # of a picture file
LONGEST_NAME = 120  # characters of a name in a message
BIDIRECTIONAL = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they reorder the surrounding text

Links = Literal["inside", "anywhere"]


@dataclass
class FoundFiles:
    """The result of walking a data folder."""

    pictures: list[Path] = field(default_factory=list)
    """Files with a picture's extension, sorted by relative name; may include dangling links."""
    rejected: list[RejectedEntry] = field(default_factory=list)
    """Links that are not followed, and folders that cannot be read."""
    left_alone: Counter[str] = field(default_factory=Counter)  # pictures of unsupported formats, counted by extension


def is_outside(path: str | Path, root: str | Path) -> bool:
    """Whether a path lies outside a folder once links are resolved."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


OUTSIDE = "is a symbolic link to a target outside the data folder. Copy the target, or set data.links=anywhere"


def walk(root: Path, links: Links) -> FoundFiles:
    """Find the picture files below the data folder ``root``, skipping hidden files and folders.

    Enters linked folders only with ``anywhere``, after all others, and each real folder once, so cycles terminate.
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
            suffix = os.path.splitext(entry.name)[1].lower()
            if _is_folder(entry):
                (linked if entry.is_symlink() else waiting).append(entry.path)
            elif suffix in OTHER_PICTURES:
                found.left_alone[suffix] += 1
            elif suffix not in SUFFIXES:
                continue
            elif links == "inside" and entry.is_symlink() and is_outside(entry.path, root):
                found.rejected.append(RejectedEntry(_relative(entry.path, root), OUTSIDE))
            else:
                found.pictures.append(Path(entry.path))
        if links == "inside":
            outside = [path for path in linked if is_outside(path, root)]
            found.rejected += [RejectedEntry(_relative(path, root), OUTSIDE, "folder") for path in outside]
            linked = []
    found.pictures.sort(key=lambda file: file.relative_to(root).as_posix())
    return found


def _entries(folder: str, root: Path, found: FoundFiles) -> Iterator[os.DirEntry[str]]:
    """Yield a folder's visible entries."""
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        name = _relative(folder, root) if folder != os.fspath(root) else "."
        found.rejected.append(RejectedEntry(name, f"cannot be read ({error.strerror or error})", "folder"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: reading it reports the error
        return False


def _relative(path: str, root: Path) -> str:
    return readable(Path(path).relative_to(root).as_posix())


def read_regular(file: str | Path, limit: int = MAX_BYTES) -> bytes:
    """Read a file's bytes. Refuses pipes and devices, which may never end.

    Raises:
        UnusablePicture: it cannot be read, is not a regular file, or is larger than the limit.
    """
    try:
        return regular_files.read_regular(file, limit)
    except regular_files.NotRegular:
        raise UnusablePicture("is not a regular file") from None
    except regular_files.TooLarge as error:
        raise UnusablePicture(too_large(error.size or limit + 1, limit)) from None
    except OSError as error:
        raise UnusablePicture(f"cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise UnusablePicture("cannot be read (not a valid file name)") from None


def too_large(size: int, limit: int) -> str:
    """The reason to reject a file or a text of more than ``limit`` bytes."""
    return f"has {size:,} bytes; the limit is {limit:,}"


def is_text(value: str) -> bool:
    """Whether a string can be encoded as UTF-8; lone surrogates (from file names in other encodings) cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(name: str) -> str:
    """Make a name valid UTF-8 by replacing lone surrogates with question marks."""
    return name.encode("utf-8", "replace").decode()


def printable_name(name: str) -> str:
    """Make a name or a text safe for one line of a terminal: escape line breaks and other control characters, and
    shorten a very long one in the middle."""
    cut = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}...{name[-LONGEST_NAME // 2 + 3 :]}"
    return "".join(
        character.encode("unicode_escape").decode()
        if character in BIDIRECTIONAL or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        else character
        for character in cut
    )
