"""Record a run's attempts, which are its first start and each resume: start, steps, time, memory and end of each.

``attempts.json`` in the run's folder has a row for each attempt and is rewritten at every checkpoint and evaluation;
the metrics show what a killed process did after that. A run's time, cost and memory cover all attempts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, TypeAdapter

from simpletune.runs.folder import ATTEMPTS, METRICS, read_rows
from simpletune.system.atomic import quarantine, write_json
from simpletune.system.console import say
from simpletune.system.disk import DiskFull
from simpletune.system.options import Json, UserError
from simpletune.system.redact import redact
from simpletune.system.signals import Stopped
from simpletune.system.stage_timer import Stage, StageTimer

WARM_UP = 2  # first steps of each process, excluded from medians because allocators and caches fill
Ended = Literal["finished", "stopped", "failed", "killed"]


class Attempt(BaseModel):
    """What the process of one start or resume did."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    started: AwareDatetime
    """Start time of the process."""
    device: str
    """Description of the device."""
    from_step: int
    """Number of steps before this attempt."""
    last_step: int
    """Last step known to be finished."""
    seconds: float
    """Seconds from the start to the last known moment."""
    seconds_setup: float = 0.0
    """Part of ``seconds`` before the first step."""
    stages: dict[str, Stage] = {}
    """Time and peak memory by stage."""
    ended: Ended | None = None
    """How the attempt ended; None while it runs, or if it was killed."""
    doing: str = ""
    """What it does now beside the steps; empty while it trains."""
    reason: str = ""
    """Signal or request that stopped the attempt, or the error message."""

    def describe(self) -> str:
        """Describe how the attempt ended."""
        if self.ended == "stopped":
            return f"stopped by {self.reason}"
        return self.ended or "no end recorded"


def read_attempts(folder: Path) -> list[Attempt]:
    """Read the attempts of a run, oldest first; empty if there is no record. Raises ValueError if it is damaged."""
    file = folder / ATTEMPTS
    return TypeAdapter(list[Attempt]).validate_json(file.read_bytes()) if file.exists() else []


def attempts_of(folder: Path) -> list[Attempt]:
    """Read the attempts of a run; empty if the record is damaged."""
    try:
        return read_attempts(folder)
    except (ValueError, OSError):
        return []


def with_unrecorded_steps(attempts: Sequence[Attempt], metrics: Iterable[Json]) -> list[Attempt]:
    """Add the steps that the last process finished after its last record, from the rows of metrics.jsonl."""
    last = attempts[-1] if attempts else None
    later = [row for row in metrics if row["step"] > last.last_step] if last is not None and last.ended is None else []
    if last is None or not later:
        return list(attempts)
    seconds = sum(row.get("seconds", 0.0) for row in later)
    train = Stage(seconds=seconds)
    train.merge(last.stages.get("train", Stage()))
    stages = {**last.stages, "train": train}
    changes = {"last_step": later[-1]["step"], "seconds": round(last.seconds + seconds, 2), "stages": stages}
    return [*attempts[:-1], last.model_copy(update=changes)]


def close_killed(folder: Path) -> None:
    """Record that the last process was killed if it recorded no end; the caller must hold the run's lock.

    Sets a damaged record aside, so that the time of earlier processes is not counted.
    """
    try:
        attempts = read_attempts(folder)
    except (ValueError, OSError):  # OSError: a folder instead of the file
        place = quarantine(folder / ATTEMPTS)
        say(f"warning {folder / ATTEMPTS} is damaged: set aside as {place}. Earlier attempts are not counted")
        return
    if attempts and attempts[-1].ended is None:
        try:
            *before, last = with_unrecorded_steps(attempts, read_rows(folder / METRICS))
        except (UserError, KeyError, TypeError):  # damaged metrics are reported when they are opened next
            *before, last = attempts
        _write(folder, [*before, last.model_copy(update={"ended": "killed"})])


def _write(folder: Path, attempts: Sequence[Attempt]) -> None:
    write_json(folder / ATTEMPTS, [attempt.model_dump(mode="json") for attempt in attempts])


def total_seconds(attempts: Iterable[Attempt]) -> float:
    """Sum the seconds of all attempts."""
    return round(sum(attempt.seconds for attempt in attempts), 2)


def merged_stages(attempts: Iterable[Attempt]) -> dict[str, Stage]:
    """Merge the stages of all attempts: add times and take the largest peaks."""
    found: dict[str, Stage] = {}
    for attempt in attempts:
        for name, stage in attempt.stages.items():
            found.setdefault(name, Stage()).merge(stage)
    return found


def median_seconds(rows: Sequence[Json], attempts: Sequence[Attempt]) -> float | None:
    """Return the median seconds per step without the warm-up of each process; None if no step was timed."""
    starts = [attempt.from_step for attempt in attempts] or [0]
    timed = [row for row in rows if "seconds" in row]
    warm = [row for row in timed if not any(start < row["step"] <= start + WARM_UP for start in starts)]
    return statistics.median(row["seconds"] for row in warm or timed) if timed else None


def describe_end(error: BaseException) -> tuple[Ended, str]:
    """Return how a process ended that raised this error, and why."""
    if isinstance(error, Stopped | KeyboardInterrupt):
        return "stopped", error.by if isinstance(error, Stopped) else "SIGINT"
    # as it is printed to the terminal
    return "failed", redact(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


class AttemptRecorder:
    """Maintain the row of this process; as a context manager, record how the process ended.

    Args:
        folder: run folder.
        began: start time of the process by ``time.perf_counter``.
    """

    def __init__(self, folder: Path, began: float):
        self.folder, self.began = folder, began
        self.last_step = 0
        self.all: list[Attempt] = []  # attempts of the run, this one last
        self._stages: StageTimer | None = None  # None: this process does not record

    def begin(self, device: str, from_step: int, stages: StageTimer) -> None:
        """Add this process to the run's record; ``stages`` is the live timer of its stages."""
        started = datetime.now(UTC) - timedelta(seconds=self._seconds())
        row = Attempt(
            started=started.replace(microsecond=0), device=device, from_step=from_step, last_step=from_step, seconds=0
        )
        self.all, self._stages, self.last_step = [*read_attempts(self.folder), row], stages, from_step
        self.update()

    def set_up(self) -> float:
        """Record that the first step begins, and return the seconds before it."""
        seconds = self._seconds()
        self.update(seconds_setup=seconds)
        return seconds

    def update(self, **changes: object) -> None:
        """Record the progress of this process, and new values of other fields; nothing in one that does not record."""
        if self._stages is None:
            return
        figures = {name: Stage(**values) for name, values in self._stages.as_json().items()}
        changes |= {"last_step": self.last_step, "seconds": self._seconds(), "stages": figures}
        self.all[-1] = self.all[-1].model_copy(update=changes)
        _write(self.folder, self.all)

    def note_work(self, words: str) -> None:
        """Record what is being done beside the steps, for pages, and nothing else; empty: nothing."""
        if self._stages is None:
            return
        self.all[-1] = self.all[-1].model_copy(update={"doing": words})
        with suppress(OSError, DiskFull):  # the work itself says that the disk is full
            _write(self.folder, self.all)

    def close(self) -> None:
        """Stop recording, because the run is finished."""
        self._stages = None

    def _seconds(self) -> float:
        return round(time.perf_counter() - self.began, 2)

    def __enter__(self) -> AttemptRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self._stages is None:
            return
        ended, reason = describe_end(error)
        try:
            self.update(ended=ended, reason=reason)
        except (OSError, DiskFull) as full:  # the error that ended the run matters more
            say(f"warning {self.folder / ATTEMPTS} could not be written ({full}): this attempt's end is not recorded")
