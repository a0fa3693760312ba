"""A run's attempts: its first start and each resume. When each began, from which step, its time and memory, its end.

``attempts.json`` in the run's folder has a row for each. It is rewritten at every checkpoint and evaluation; of a
process that was killed after that, the metrics tell the later steps. Time, cost and memory of a run are of all rows.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, TypeAdapter

from simpletune.options import Json, UserError
from simpletune.runs.folder import ATTEMPTS, METRICS, read_rows
from simpletune.system.atomic import quarantine, write_json
from simpletune.system.console import say
from simpletune.system.disk import DiskFull
from simpletune.system.redact import redact
from simpletune.system.signals import Stopped
from simpletune.system.stage_timer import Stage, StageTimer

WARM_UP = 2  # steps of each process that are left out of medians: allocators and caches fill
Ended = Literal["finished", "stopped", "failed", "killed"]


class Attempt(BaseModel):
    """One start of a run, the first or a resume: what its process did."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    started: AwareDatetime
    """When the process started."""
    device: str
    """Where it ran, in words."""
    from_step: int
    """Steps that were done before it."""
    last_step: int
    """The last step that it is known to have done."""
    seconds: float
    """From its start to the last moment that is known of it."""
    seconds_setup: float = 0.0
    """Of these, before its first step."""
    stages: dict[str, Stage] = {}
    """Time and peak memory by stage."""
    ended: Ended | None = None
    """How it ended; None: it runs, or was killed."""
    reason: str = ""
    """The signal that stopped it, or the error as the terminal showed it."""

    def in_words(self) -> str:
        """How it ended, in a few words."""
        if self.ended == "stopped":
            return f"stopped by {self.reason}"
        return self.ended or "no end is recorded"


_ROWS = TypeAdapter(list[Attempt])


def read_attempts(folder: Path) -> list[Attempt]:
    """The attempts of a run, the first one first; none of a run by an older version.

    Raises:
        ValueError: the file is damaged.
    """
    file = folder / ATTEMPTS
    return _ROWS.validate_json(file.read_bytes()) if file.exists() else []


def known(attempts: Sequence[Attempt], metrics: Iterable[Json]) -> list[Attempt]:
    """The attempts with the steps that a process did after it wrote its row for the last time.

    Args:
        attempts: as recorded.
        metrics: the rows of metrics.jsonl, before those of steps to be done again are dropped.
    """
    if not attempts or attempts[-1].ended is not None:
        return list(attempts)
    last = attempts[-1]
    later = [row for row in metrics if row["step"] > last.last_step]
    if not later:
        return list(attempts)
    seconds = sum(row.get("seconds", 0.0) for row in later)
    train = Stage(seconds=seconds)
    train.merge(last.stages.get("train", Stage()))
    stages = {**last.stages, "train": train}
    changes = {"last_step": later[-1]["step"], "seconds": round(last.seconds + seconds, 2), "stages": stages}
    return [*attempts[:-1], last.model_copy(update=changes)]


def close_killed(folder: Path) -> None:
    """Record that the last process of a run was killed, if it left no end; the caller holds the run's lock.

    A damaged record is set aside: then the time of the earlier processes is not counted.
    """
    try:
        attempts = read_attempts(folder)
    except (ValueError, OSError):  # a folder in its place, too
        place = quarantine(folder / ATTEMPTS)
        say(f"warning {folder / ATTEMPTS} is damaged: set aside as {place}. The attempts so far are not counted")
        return
    if attempts and attempts[-1].ended is None:
        try:
            *before, last = known(attempts, read_rows(folder / METRICS))
        except (UserError, KeyError, TypeError):  # damaged metrics: who opens them next says so
            *before, last = attempts
        _write(folder, [*before, last.model_copy(update={"ended": "killed"})])


def _write(folder: Path, attempts: Sequence[Attempt]) -> None:
    write_json(folder / ATTEMPTS, _ROWS.dump_python(list(attempts), mode="json"))


def total_seconds(attempts: Iterable[Attempt]) -> float:
    """The time of all processes together."""
    return round(sum(attempt.seconds for attempt in attempts), 2)


def setup_seconds(attempts: Iterable[Attempt]) -> float:
    """Of that, before the first step of each."""
    return round(sum(attempt.seconds_setup for attempt in attempts), 2)


def merged_stages(attempts: Iterable[Attempt]) -> dict[str, Stage]:
    """Stages of all processes: times add up, the largest peak stays."""
    found: dict[str, Stage] = {}
    for attempt in attempts:
        for name, stage in attempt.stages.items():
            found.setdefault(name, Stage()).merge(stage)
    return found


def median_seconds(rows: Sequence[Json], attempts: Sequence[Attempt]) -> float | None:
    """Median seconds of a step, without the first steps of each process; None: no step is timed."""
    starts = [attempt.from_step for attempt in attempts] or [0]
    timed = [row for row in rows if "seconds" in row]
    warm = [row for row in timed if not any(start < row["step"] <= start + WARM_UP for start in starts)]
    return statistics.median(row["seconds"] for row in warm or timed) if timed else None


def ending_of(error: BaseException) -> tuple[Ended, str]:
    """How a process ends that an exception ends, and the reason: an error's words are those of the terminal."""
    if isinstance(error, Stopped):
        return "stopped", signal.Signals(error.code - 128).name
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "SIGINT"
    if isinstance(error, UserError):
        return "failed", redact(str(error))
    return "failed", redact(f"{type(error).__name__}: {error}")


class AttemptRecorder:
    """Keeps the row of this process; as a context it records how the process ended.

    Args:
        folder: of the run.
        began: when the process started, by ``time.perf_counter``.
    """

    def __init__(self, folder: Path, began: float):
        self.folder, self.began = folder, began
        self.last_step = 0
        self._stages: StageTimer | None = None
        self._rows: list[Attempt] = []

    def begin(self, device: str, from_step: int, stages: StageTimer) -> None:
        """Add this process to the run's record.

        Args:
            device: where it runs, in words.
            from_step: steps done before.
            stages: its time and memory, as they grow.
        """
        started = datetime.now(UTC) - timedelta(seconds=self._seconds())
        row = Attempt(
            started=started.replace(microsecond=0), device=device, from_step=from_step, last_step=from_step, seconds=0
        )
        self._rows, self._stages, self.last_step = [*read_attempts(self.folder), row], stages, from_step
        self.update()

    @property
    def all(self) -> list[Attempt]:
        """The attempts of the run, this one last."""
        return self._rows

    def set_up(self) -> float:
        """Record that the first step comes now; returns the seconds before it."""
        seconds = self._seconds()
        self.update(seconds_setup=seconds)
        return seconds

    def update(self, **changes: object) -> None:
        """Record how far this process has come; nothing in a process that does not write.

        Args:
            changes: of other fields of its row.
        """
        if self._stages is None:
            return
        figures = {name: Stage(**values) for name, values in self._stages.as_json().items()}
        changes |= {"last_step": self.last_step, "seconds": self._seconds(), "stages": figures}
        self._rows[-1] = self._rows[-1].model_copy(update=changes)
        _write(self.folder, self._rows)

    def close(self) -> None:
        """Leave the record as it is: the run is finished, whatever comes."""
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
        ended, reason = ending_of(error)
        try:
            self.update(ended=ended, reason=reason)
        except (OSError, DiskFull) as full:  # what ended the run is the error to tell
            say(f"warning {self.folder / ATTEMPTS} could not be written ({full}): how this ended is not kept")
