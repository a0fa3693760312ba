"""Follow a growing JSON Lines file, and keep as many points of each of its numbers as a chart shows.

A look reads only what was appended. Neighbouring points are merged in pairs once there are too many, so that memory and
charts of a run with a hundred thousand steps are as small as with a thousand.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from simpletune.system.options import Json

MOST = 400  # points of a series; a chart is about 700 pixels wide
SHARE, LONGEST = 1 / 20, 100  # the smoothed line's span: a fraction of the steps so far, at most 100 steps
RECENT = 50  # last rows to keep whole by default
CHUNK = 2**22  # bytes read at once
KEPT = 32  # files whose series are kept: two of a run


@dataclass
class SeriesPoint:
    """Several neighbouring steps."""

    step: int  # the last one
    count: int
    total: float  # of their values
    low: float
    high: float
    smooth: float  # smoothed value at the last step

    @property
    def mean(self) -> float:
        return self.total / self.count

    def merge(self, later: SeriesPoint) -> SeriesPoint:
        low, high = min(self.low, later.low), max(self.high, later.high)
        return SeriesPoint(later.step, self.count + later.count, self.total + later.total, low, high, later.smooth)


@dataclass
class Series:
    """A number by step, in at most ``MOST`` points that cover equally many steps."""

    points: list[SeriesPoint] = field(default_factory=list)
    width: int = 1
    _count: int = 0
    _smooth: float = 0.0

    def add(self, step: int, value: float) -> None:
        """Add the value of a later step."""
        self._smooth += (value - self._smooth) / min(1 + SHARE * self._count, LONGEST)
        self._count += 1
        new = SeriesPoint(step, 1, value, value, value, self._smooth)
        if self.points and self.points[-1].count < self.width:
            self.points[-1] = self.points[-1].merge(new)
        else:
            self.points.append(new)
        if len(self.points) > MOST:
            pairs = zip(self.points[::2], [*self.points[1::2], None], strict=False)
            self.points = [one if two is None else one.merge(two) for one, two in pairs]
            self.width *= 2


class Follower:
    """Read a file of JSON lines, which need not exist yet, as it grows: ``series`` has the numbers of its rows by name,
    and ``recent`` the last ``keep`` rows whole."""

    def __init__(self, file: Path, names: tuple[str, ...], keep: int = RECENT):
        self.file = file
        self.names = names
        self.keep = keep
        self._reset()

    def _reset(self) -> None:
        self.series: dict[str, Series] = {name: Series() for name in self.names}
        self.recent: list[Json] = []
        self.rows = 0
        self._place, self._identity = 0, 0

    def look(self) -> None:
        """Read what was appended; rereads everything if the file was replaced or became shorter, as after a resume."""
        try:
            with self.file.open("rb") as opened:
                status = self.file.stat()
                if status.st_ino != self._identity or status.st_size < self._place:
                    self._reset()
                    self._identity = status.st_ino
                opened.seek(self._place)
                while text := opened.read(CHUNK):
                    whole, newline, _ = text.rpartition(b"\n")
                    if not newline:
                        break  # still being written, or longer than any line of ours
                    self._place += len(whole) + 1
                    opened.seek(self._place)
                    self._take(whole)
        except OSError:  # missing, or not a file
            self._reset()

    def _take(self, text: bytes) -> None:
        for line in text.split(b"\n"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # damaged; a resume warns about it and sets the file aside
                continue
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                continue
            self.rows += 1
            self.recent.append(row)
            del self.recent[: -self.keep]
            for name, series in self.series.items():
                value = row.get(name)
                if isinstance(value, int | float) and math.isfinite(value):
                    series.add(row["step"], float(value))


_followers = lru_cache(maxsize=KEPT)(Follower)  # of the runs viewed last
_lock = threading.Lock()


def follow(file: Path, names: tuple[str, ...], keep: int = RECENT) -> Follower:
    """Return the follower of a file, up to date."""
    with _lock:
        found = _followers(file, names, keep)
        found.look()
        return found
