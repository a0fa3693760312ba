"""Count a part of a simulation again instead of running an equal part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from simpletune.engine.memory.snapshot import HOST, MemorySnapshot


class Repeats(Protocol):
    """An observer that can count a part of what it saw again."""

    def begin(self) -> object:
        """Remember what has been seen so far."""

    def seen_since(self, begin: object) -> object:
        """Return what has been seen since ``begin``; None if it cannot be counted again."""

    def repeat(self, seen: object) -> None:
        """Count what ``seen_since`` returned again."""


@dataclass
class PartAllocations:
    """What is allocated in a part of a simulation, in bytes relative to its beginning.

    Args:
        begin: bytes by kind at its beginning.
        top: total and bytes by kind at its peak.
        allocated: bytes by kind at its peak.
        left: bytes still allocated at its end, all kinds together.
        work: what the observer saw in it.
    """

    begin: Counter[str]
    top: tuple[int, Mapping[str, int]] = (0, {})
    allocated: Counter[str] = field(default_factory=Counter)
    left: int = 0
    work: object = None


@dataclass
class PartPeaks:
    """The largest snapshots of a part of a simulation.

    Args:
        peak: the largest of all phases.
        by_phase: the largest of each phase.
    """

    peak: MemorySnapshot = field(default_factory=MemorySnapshot)
    by_phase: dict[str, MemorySnapshot] = field(default_factory=dict)

    def with_more(self, kind: str, size: int) -> PartPeaks:
        """These peaks with more bytes of one kind allocated throughout."""
        by_phase = {name: _with_more(each, kind, size) for name, each in self.by_phase.items()}
        return PartPeaks(_with_more(self.peak, kind, size), by_phase)


def _with_more(snapshot: MemorySnapshot, kind: str, size: int) -> MemorySnapshot:
    by_kind = {**snapshot.by_kind, kind: snapshot.by_kind.get(kind, 0) + size}
    return MemorySnapshot(snapshot.bytes + size, by_kind, snapshot.phase, snapshot.module)


class Repeating:
    """The part of an accounting that counts parts again. Keeps live bytes by kind in ``_bytes``."""

    _bytes: Counter[str]
    peak: MemorySnapshot
    peaks: dict[str, MemorySnapshot]
    snapshots: list[MemorySnapshot] | None
    observer: object

    def __init__(self) -> None:
        self.repeats: Repeats | None = None
        """The accounting's observer, if it can repeat what it saw."""
        self.passes: dict[object, object] = {}
        """What blocks' passes did (see equal_blocks.py)."""
        self._watched: PartAllocations | None = None

    def _record(self, total: int, by_kind: Callable[[], dict[str, int]]) -> None:
        raise NotImplementedError

    def _kind(self) -> str:
        raise NotImplementedError

    def _snapshot_name(self) -> str:
        raise NotImplementedError

    def _see(self, storage: torch.UntypedStorage) -> bool:
        raise NotImplementedError

    @contextmanager
    def watching(self) -> Iterator[PartAllocations]:
        """Record what is allocated in this context; the figures are complete when it ends."""
        watched = self._watched = PartAllocations(Counter(self._bytes))
        begin = None if self.repeats is None else self.repeats.begin()
        try:
            yield watched
        finally:
            self._watched = None
        total, by_kind = watched.top
        if total:
            kinds = {*by_kind, *watched.begin} - {HOST}
            watched.allocated = Counter({kind: by_kind.get(kind, 0) - watched.begin[kind] for kind in kinds})
        watched.left = sum(self._bytes.values()) - sum(watched.begin.values())
        watched.work = None if self.repeats is None else self.repeats.seen_since(begin)

    @contextmanager
    def apart(self) -> Iterator[PartPeaks]:
        """Find the largest snapshots within this context alone; afterwards they count like all others."""
        found, whole = PartPeaks(), PartPeaks(self.peak, self.peaks)
        self.peak, self.peaks = found.peak, found.by_phase
        try:
            yield found
        finally:
            found.peak = self.peak
            self.peak, self.peaks = whole.peak, whole.by_phase
            self.include(found)

    def include(self, found: PartPeaks) -> None:
        """Count the largest snapshots of a part."""
        for name, snapshot in found.by_phase.items():
            self.peaks[name] = max(snapshot, self.peaks.get(name, snapshot), key=lambda each: each.bytes)
        self.peak = max(found.peak, self.peak, key=lambda each: each.bytes)

    def repeat(self, allocated: Mapping[str, int], work: object) -> None:
        """Count a part again.

        Args:
            allocated: see ``PartAllocations``.
            work: see ``PartAllocations``.
        """
        if allocated:
            kinds = {*self._bytes, *allocated} - {HOST}
            by_kind = {kind: self._bytes[kind] + allocated.get(kind, 0) for kind in kinds}
            self._record(sum(by_kind.values()), lambda: {kind: size for kind, size in by_kind.items() if size})
        if self.repeats is not None:
            self.repeats.repeat(work)

    @property
    def can_repeat(self) -> bool:
        """Whether a part may be counted again: not if every snapshot is kept, and not inside another such part."""
        return self.snapshots is None and self._watched is None and (self.observer is None) == (self.repeats is None)

    @property
    def kind_and_phase(self) -> tuple[str, str]:
        """The kind assigned to new allocations, and the current phase."""
        return self._kind(), self._snapshot_name()

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that no operation returned."""
        for tensor in tensors:
            self._see(tensor.untyped_storage())
