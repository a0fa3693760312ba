"""Walk a data folder: find picture files, follow symbolic links safely, and read files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from simpletune.data.sources.accounts import Accounts, FileClass
from simpletune.data.sources.source import RejectedEntry, UnusableImage
from simpletune.system import regular_files

FIRST = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".gif", ".heic", ".heif", ".tif", ".tiff")
"""Suffixes of the pictures that release 0.1.0 found in a folder."""
SUFFIXES = (
    *FIRST, ".jfif", ".jpe", ".jif", ".mpo", ".apng", ".hif", ".jp2", ".j2k", ".j2c", ".jpf", ".jpx", ".ppm", ".pgm",
    ".pbm", ".pnm", ".qoi", ".dds", ".ico", ".pcx", ".sgi", ".tga",
)  # fmt: skip
DATA_SET_FILES = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "readme.md", "license")
"""Files that datasets, or the hub, keep beside tables, in lower case."""
USUAL = "jpg, png, webp, avif, heic, tiff and others"  # in messages
OTHER_IMAGES = (
    ".jxl", ".psd", ".psb", ".svg", ".xcf", ".kra", ".exr", ".hdr", ".eps",
    ".3fr", ".arw", ".cr2", ".cr3", ".dng", ".erf", ".iiq", ".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2",
    ".srw", ".x3f",
)  # fmt: skip
"""Suffixes of pictures that are not read: other formats, and the raw files of cameras."""
FOREIGN_FOLDERS = ("__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found")
"""Folders that other programs leave among pictures, in lower case."""
FOREIGN_FILES = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r")
FOREIGN_SUFFIXES = (".aae", ".xmp", ".thm", ".npz", ".ini", ".lnk", ".url", ".part", ".crdownload", ".tmp", ".bak")
MAX_BYTES = 2**30  # of a picture file

Links = Literal["inside", "anywhere"]
Reading = Literal["0.1", "any"]  # data.reading


@dataclass
class FoundFiles:
    """The result of walking a data folder."""

    images: list[Path] = field(default_factory=list)
    """Files with a picture's extension, sorted by relative name; may include dangling links."""
    others: list[Path] = field(default_factory=list)
    """All other files, but those of other programs, sorted by relative name."""
    foreign: list[Path] = field(default_factory=list)
    """Hidden files and folders, and what other programs leave among pictures; such folders are not entered."""
    linked: list[Path] = field(default_factory=list)
    """Links to folders inside, or found already, whose files are found where they are."""
    rejected: list[RejectedEntry] = field(default_factory=list)
    """Links that are not followed, and folders that cannot be read."""
    left_alone: Counter[str] = field(default_factory=Counter)  # pictures of unsupported formats, counted by extension


def is_outside(path: str | Path, root: str | Path) -> bool:
    """Return whether a path lies outside a folder once links are resolved."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


OUTSIDE = "is a symbolic link to a target outside the data folder. Copy the target, or set data.links=anywhere"


def _is_foreign(name: str, folder: bool, reading: Reading) -> bool:
    """Return whether a file or folder of this name is hidden, or is known to be another program's."""
    low = name.lower()
    if folder:
        return name.startswith(".") or (reading == "any" and low in FOREIGN_FOLDERS)
    return name.startswith(".") or low in FOREIGN_FILES or low.endswith(FOREIGN_SUFFIXES)


def walk(root: Path, links: Links, reading: Reading = "any") -> FoundFiles:
    """Find the files below the data folder ``root``.

    Enters linked folders only with ``anywhere``, after all others, and each real folder once, so cycles terminate.
    """
    found, seen = FoundFiles(), set[str]()
    waiting, linked = [os.fspath(root)], list[str]()
    suffixes = SUFFIXES if reading == "any" else FIRST
    while waiting or linked:
        folder = waiting.pop() if waiting else linked.pop(0)
        real = os.path.realpath(folder)
        if real in seen:
            found.linked.append(Path(folder))
            continue
        seen.add(real)
        for entry in _entries(folder, root, found):
            suffix = os.path.splitext(entry.name)[1].lower()
            is_folder = _is_folder(entry)
            if _is_foreign(entry.name, is_folder, reading):
                found.foreign.append(Path(entry.path))
            elif is_folder:
                (linked if entry.is_symlink() else waiting).append(entry.path)
            elif suffix not in suffixes:
                found.others.append(Path(entry.path))
                found.left_alone.update([suffix] if suffix in OTHER_IMAGES else [])
            elif links == "inside" and entry.is_symlink() and is_outside(entry.path, root):
                found.rejected.append(RejectedEntry(_relative(entry.path, root), OUTSIDE))
            else:
                found.images.append(Path(entry.path))
        if links == "inside":
            outside = [path for path in linked if is_outside(path, root)]
            found.rejected += [RejectedEntry(_relative(path, root), OUTSIDE, "folder") for path in outside]
            found.linked += [Path(path) for path in linked if path not in outside]
            linked = []
    above = os.path.join(root, "")
    for files in (found.images, found.others, found.foreign):  # paths' own methods take seconds for 100,000 files
        files.sort(key=lambda file: os.fspath(file).removeprefix(above).replace(os.sep, "/"))
    return found


def _entries(folder: str, root: Path, found: FoundFiles) -> Iterator[os.DirEntry[str]]:
    """Yield a folder's entries."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        name = _relative(folder, root) if folder != os.fspath(root) else "."
        found.rejected.append(RejectedEntry(name, f"cannot be read ({error.strerror or error})", "folder"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: reading it reports the error
        return False


def _relative(path: str, root: Path) -> str:
    return replace_surrogates(Path(path).relative_to(root).as_posix())


def read_regular(file: str | Path, limit: int = MAX_BYTES) -> bytes:
    """Read a file's bytes. Refuses pipes and devices, which may never end.

    Raises:
        UnusableImage: it cannot be read, is not a regular file, or is larger than the limit.
    """
    try:
        return regular_files.read_regular(file, limit)
    except regular_files.NotRegular:
        raise UnusableImage("is not a regular file") from None
    except regular_files.TooLarge as error:
        raise UnusableImage(format_too_large(error.size or limit + 1, limit)) from None
    except OSError as error:
        raise UnusableImage(f"cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise UnusableImage("cannot be read (not a valid file name)") from None


def format_too_large(size: int, limit: int) -> str:
    """Return the reason to reject a file or a text of more than ``limit`` bytes."""
    return f"has {size:,} bytes; the limit is {limit:,}"


def is_text(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8; lone surrogates (from file names in other encodings) cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def replace_surrogates(name: str) -> str:
    """Make a name valid UTF-8 by replacing lone surrogates with question marks."""
    return name.encode("utf-8", "replace").decode()


def account_tables(root: Path, used: Collection[str], left: Mapping[str, str]) -> Accounts:
    """Say what each file of a folder of tables or shards is. ``used``: the names, relative or not, of those that are
    read; ``left``: those that are not, with the reason."""
    found = walk(root, "inside")
    images, foreign = set(found.images), set(found.foreign)
    classes: dict[str, tuple[FileClass, str]] = {}
    for file in (*found.images, *found.others, *found.foreign):
        name = file.relative_to(root).as_posix()
        if file in foreign or file.name.lower() in DATA_SET_FILES:
            classes[replace_surrogates(name)] = "foreign", ""
        elif name in used or file.name in used:
            classes[replace_surrogates(name)] = "table", ""
        elif name in left:
            classes[replace_surrogates(name)] = "left over", left[name]
        elif file in images:
            classes[replace_surrogates(name)] = "left over", "lies beside tables, and is read only where a row names it"
        else:
            classes[replace_surrogates(name)] = "not read", "neither a table nor a picture"
    for each in found.rejected:
        classes[f"{each.name}/" if each.kind == "folder" else each.name] = "left over", each.reason
    return Accounts(classes)
