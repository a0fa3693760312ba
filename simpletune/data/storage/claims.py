"""Divide keys among processes that fill the same folder, whether they belong to one run or several, on one machine or
several: the process that locks a range of keys fills it, and its lock ends with it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from simpletune.system.console import say
from simpletune.system.locks import Ranges, lock_of
from simpletune.system.options import plural

PLACES = 2**60  # number of places for keys: 15 hexadecimal digits of the hash that names a key's file


@dataclass(frozen=True)
class KeyRange:
    """Share of the keys that a process encodes first: those whose hash lies in its part of the hash range.

    Args:
        number: index of the process, from 0.
        of: number of processes.
    """

    number: int = 0
    of: int = 1

    def owner(self, key: str) -> int:
        """Return the index of the process whose share contains a key."""
        return place_of(key) * self.of // PLACES

    def count(self, keys: int) -> int:
        """Estimate how many of ``keys`` keys each process encodes; at least 1."""
        return -(-keys // self.of) or 1


ALONE = KeyRange()


def place_of(key: str) -> int:
    """Map a key uniformly to an integer from 0 to ``PLACES``."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:15], 16)


class KeyedFolder(ABC):
    """Folder with a file for each key, filled by several processes, which lock ranges of keys by the file ``lock``
    (None: the folder's own)."""

    def __init__(self, folder: Path, lock: Path | None = None):
        self.folder, self._lock = folder, lock or lock_of(folder)

    @abstractmethod
    def file(self, key: str) -> Path: ...

    def __contains__(self, key: str) -> bool:
        return self.file(key).exists()

    @abstractmethod
    def remove_unfinished(self, ranges: Ranges) -> None:
        """Delete the partial files that no process is writing."""

    def claim(
        self,
        keys: Iterable[str],
        share: KeyRange = ALONE,
        together: int = 1,
        is_done: Callable[[str], bool] | None = None,
    ) -> Iterator[list[str]]:
        """Claim keys to encode, in groups, each locked against other processes until the next one is requested: first
        the keys of the share, then those that other processes have not begun, from the end of their shares, and last,
        after waiting, those that others locked but did not write. Deletes the partial files of killed processes.

        Args:
            keys: the keys to encode.
            share: the share of this process.
            together: largest number of keys in a group.
            is_done: whether a key needs no encoding; None: whether it is in this folder.

        Yields:
            Groups of keys that are not done. Each key is yielded at most once.
        """
        keys, is_done = list(dict.fromkeys(keys)), is_done or self.__contains__
        by_owner: dict[int, list[str]] = {}
        for key in sorted(keys, key=place_of):
            by_owner.setdefault(share.owner(key), []).append(key)
        tried = _split(by_owner.get(share.number, []), together)
        for later in range(1, share.of):
            tried += _split(by_owner.get((share.number + later) % share.of, []), together)[::-1]
        order = {key: number for number, key in enumerate(keys)}
        with Ranges(self._lock) as ranges:
            self.remove_unfinished(ranges)
            for group in self._claim_each(tried[::-1], ranges, is_done):
                lacking = sorted((key for key in group if not is_done(key)), key=order.__getitem__)
                if lacking:
                    yield lacking
            self.remove_unfinished(ranges)  # left by processes killed in the meantime

    def _claim_each(
        self, tried: list[list[str]], ranges: Ranges, is_done: Callable[[str], bool]
    ) -> Iterator[list[str]]:
        """Yield each group, the last one first, while its range is locked. Splits groups that others hold, and yields
        them last."""
        held: list[list[str]] = []
        while tried:
            group = [key for key in tried.pop() if not is_done(key)]
            with ranges.hold(*_range(group)) if group else nullcontext(False) as claimed:
                if claimed:
                    yield group
                elif len(group) > 1:  # another process holds part of it
                    tried += _split(group, len(group) // 2)[::-1]
                else:
                    held.append(group)
        waiting = [group for group in held if group and not is_done(group[0])]
        if waiting:
            say(f"cache   waiting for {plural(len(waiting), 'file')} of {self.folder} that other processes encode")
        for group in waiting:
            with ranges.hold(*_range(group), wait=True):
                yield group


def _split(keys: list[str], together: int) -> list[list[str]]:
    return [keys[start : start + together] for start in range(0, len(keys), together)]


def _range(group: list[str]) -> tuple[int, int]:
    return place_of(group[0]), place_of(group[-1])
