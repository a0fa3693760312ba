"""What each file of a data folder is to training: every file is in exactly one class."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from simpletune.system.options import join_names, plural
from simpletune.system.printable import printable_name

FileClass = Literal["picture", "table", "caption", "mask", "left over", "damaged", "not read", "foreign"]
WORDS: dict[FileClass, tuple[str, str]] = {
    "picture": ("picture", "pictures"),
    "table": ("table or shard", "tables or shards"),
    "caption": ("file of captions", "files of captions"),
    "mask": ("mask", "masks"),
    "left over": ("left over", "left over"),
    "damaged": ("damaged", "damaged"),
    "not read": ("of a kind that is not read", "of a kind that is not read"),
    "foreign": ("of another program", "of other programs"),
}
"""How the line of sums names one, and several, of each class."""
NAMED: tuple[FileClass, ...] = ("left over", "damaged", "not read", "mask")
"""The classes whose files are named, the most surprising first."""
LISTED, SENTENCES = 3, 8  # names in a sentence, and sentences


@dataclass(frozen=True)
class Accounts:
    """The class of each file, with the reason where it is not plain, by its path relative to the folder.

    A hidden folder, another program's, and one that cannot be read stand for what is in them."""

    files: Mapping[str, tuple[FileClass, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.files)

    def count(self, kind: FileClass) -> int:
        return sum(each == kind for each, _ in self.files.values())

    def line(self) -> str:
        """Format the sums in one line."""
        counts = Counter(kind for kind, _ in self.files.values())
        parts = [f"{counts[kind]:,} {words[counts[kind] != 1]}" for kind, words in WORDS.items() if counts[kind]]
        return f"{plural(len(self.files), 'file')}: {', '.join(parts) or 'none'}"

    def reason_sentences(self) -> list[str]:
        """Return a sentence for each reason for which files are not used, the most surprising first."""
        groups: dict[tuple[FileClass, str], list[str]] = defaultdict(list)
        for name, (kind, reason) in self.files.items():
            if kind in NAMED and reason:
                groups[kind, _generalise(name, reason)].append(name)
        order = sorted(groups, key=lambda key: (NAMED.index(key[0]), -len(groups[key]), key[1]))
        said = []
        for key in order[:SENTENCES]:
            names = groups[key]
            reason = key[1] if len(names) > 1 else self.files[names[0]][1]
            said.append(f"{join_names([printable_name(name) for name in names], LISTED)}: {reason}")
        rest = sum(len(groups[key]) for key in order[SENTENCES:])
        return [*said, f"and {plural(rest, 'file')} more, which simpletune data --json lists"] if rest else said

    def with_class(self, kind: FileClass, rejected: Iterable[tuple[str, str]]) -> Accounts:
        """Add pictures that turned out to be unusable: names and reasons."""
        found = dict(self.files)
        found.update({name: (kind, reason) for name, reason in rejected if name in found})
        return Accounts(found)


def _generalise(name: str, reason: str) -> str:
    """Put NAME for the file's own name without suffix in a reason, so that many files share it: NAME.txt is missing."""
    return f" {reason}".replace(f" {PurePosixPath(name).stem}.", " NAME.")[1:]


def join_accounts(accounts: Iterable[tuple[str, Accounts]]) -> Accounts:
    """Join the accounts of several folders; each comes with the text in front of its names."""
    return Accounts({f"{before}{name}": value for before, each in accounts for name, value in each.files.items()})


def sentences(accounts: Accounts) -> Iterator[str]:
    """Describe the sums, and what is left over."""
    if accounts:
        yield accounts.line()
        yield from accounts.reason_sentences()
