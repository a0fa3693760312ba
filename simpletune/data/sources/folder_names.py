"""What names of folders mean: those of kohya's scripts, such as ``10_sks dog`` for pictures of "sks dog", each repeated
ten times, and those of splits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from simpletune.data.sources.source import UnusableImage
from simpletune.system.options import join_names, plural
from simpletune.system.printable import printable_name

# The words for a split in names of files and folders, as datasets reads them (its data_files.py).
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
KOHYA = re.compile(r"(\d{1,3})_(.*)", re.DOTALL)  # matches 10_dog, not 2024_holiday


def split_of_word(word: str) -> str:
    """Return the split that a word in lower case stands for, validation for val; the word itself if there is none."""
    return next((split for split, words in SPLITS.items() if word in words), word)


def naming_folder(root: Path, name: str) -> str:
    """Return the folder whose name applies to a picture: the first below the data folder, or the data folder itself."""
    return name.split("/")[0] if "/" in name else root.name


def meaning(folder: str) -> tuple[int, str] | None:
    """Parse repeats and words (class tokens) of a folder's name; None if it has another form or repeats 0 times."""
    match = KOHYA.fullmatch(folder)
    if match is None or not match[2].strip() or not int(match[1]):
        return None
    return int(match[1]), " ".join(match[2].split())


class MissingCaption(UnusableImage):
    """A picture has no caption at all, rather than an unusable one."""


def explain_folder_names(root: Path, names: Sequence[str]) -> list[str]:
    """Explain how the names of a data folder with these pictures were interpreted, in sentences."""
    folders = dict.fromkeys(naming_folder(root, name) for name in names)
    known = {folder: found for folder in folders if (found := meaning(folder)) is not None}
    if not known:
        return [
            "data.folder_names=kohya finds no folder like '10_sks dog' here: pictures appear data.repeats times",
        ]
    each = [
        f"{printable_name(folder)} ({plural(repeats, 'repeat')} of {words!r})"
        for folder, (repeats, words) in known.items()
    ]
    plain = [printable_name(folder) for folder in folders if folder not in known]
    rest = f"; once: {join_names(plain, 3)}" if plain else ""
    return [f"folder names read as kohya's: {join_names(each, 6)}{rest}"]


def hints_at_repeats(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Point to ``data.folder_names`` if folders are named as for kohya's scripts, where 10_dog means 10 repeats."""
    folders = dict.fromkeys([root.name, *(name.split("/")[0] for name in names if "/" in name)])
    numbers = [folder for folder in folders if (found := meaning(folder)) is not None and found[0] > 1]
    if numbers:
        yield (
            f"{printable_name(join_names(numbers, 3))}: the repeat count in a folder's name is ignored, unlike in "
            "kohya's scripts. Set data.folder_names=kohya to repeat its pictures as often, and to caption those "
            "without a caption by its words"
        )
