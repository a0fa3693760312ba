"""Carry out requests in the control file between two steps: draw, save, stop. They do not change the run's bits.

The first of several processes reads the file, at the cost of one ``stat`` per step, and sends what it found to the
others with the step's figures, so that all of them stop after the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.checkpoint_folders import checkpoint_folder
from simpletune.runs.control import (
    AnyRequest,
    DrawRequest,
    SaveRequest,
    State,
    StopRequest,
    answered_ids,
    read_requests,
)
from simpletune.runs.folder import CONTROL, CONTROL_ANSWERS, append_metrics
from simpletune.system.atomic import quarantine
from simpletune.system.console import say
from simpletune.system.disk import DiskFull
from simpletune.system.options import Json, UserError
from simpletune.system.redact import redact

SETTLED = 2.0  # seconds for which an unreadable file may still be in the process of being written
A_REQUEST = "a request"


class Control:
    """Watch a run's control file and answer it; as a context manager, refuse at the end whatever is left.

    Args:
        folder: run folder; None in a process that does not read the file.
        attempt: record of this process.
        warn: prints a warning and adds it to the summary.
        alone: whether no other process trains with this one.
    """

    def __init__(
        self,
        folder: Path | None = None,
        attempt: AttemptRecorder | None = None,
        warn: Callable[[str], None] = say,
        alone: bool = False,
    ):
        self.folder, self.attempt, self.warn, self.alone = folder, attempt, warn, alone
        self.stopped_by: str | None = None
        self._began = attempt.all[-1].started if attempt is not None else datetime.now(UTC)
        self._answered = set() if folder is None else answered_ids(folder)
        self._waiting: list[AnyRequest] = []
        self._mark: tuple[int, ...] | None = None
        self._agreed = False

    @property
    def stops(self) -> bool:
        """Whether a request asks to stop."""
        return any(isinstance(request, StopRequest) for request in self._waiting)

    @property
    def waits(self) -> bool:
        """Whether a request other than stop is waiting."""
        return any(not isinstance(request, StopRequest) for request in self._waiting)

    @property
    def ready(self) -> bool:
        """Whether requests can be answered after this step: several processes must first have logged the same steps."""
        return self.waits and (self.alone or self._agreed)

    def agree(self) -> None:
        """Record that all processes know of the requests and have logged every step."""
        self._agreed = True

    @property
    def may_answer(self) -> bool:
        """Whether requests may be answered after this step; the same in all processes."""
        return self.ready or self._agreed

    def settle(self) -> None:
        """Record, in all processes, that the requests are answered."""
        self._agreed = False

    def look(self) -> None:
        """Read the file if it has changed."""
        if self.folder is None:
            return
        try:
            status = os.stat(self.folder / CONTROL)
        except OSError:  # usually there is none; an unreachable file contains no requests
            self._waiting = []
            return
        mark = (status.st_mtime_ns, status.st_size, status.st_ino)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            requests = read_requests(self.folder)
        except UserError as error:
            self._set_aside(error, status)
            return
        written = datetime.fromtimestamp(status.st_mtime, UTC)
        self._waiting = [request for request in requests if request.id not in self._answered]
        for request in list(self._waiting):
            if (request.asked or written) < self._began:
                why = "it dates from before this start of the run. Ask again"
                self._put(request, self.attempt.last_step if self.attempt else 0, "refused", {"why": why})

    def answer(
        self,
        done: int,
        saved: bool,
        save: Callable[[int], None],
        draw: Callable[[DrawRequest, int], tuple[State, Json]],
    ) -> None:
        """Carry out the requests after ``done`` steps, except stopping.

        Args:
            done: number of finished steps.
            saved: whether this step is already saved.
            save: writes a checkpoint.
            draw: draws a picture, and returns the answer.

        Raises:
            Stopped: a signal arrived while drawing.
        """
        self._agreed = False
        for request in [each for each in self._waiting if not isinstance(each, StopRequest)]:
            clock = time.perf_counter()
            if isinstance(request, SaveRequest):
                if not saved:
                    save(done)
                saved = True
                state: State = "done"
                more: Json = {"file": str(checkpoint_folder(Path(), done))}
            else:
                state, more = draw(request, done)
            self._put(request, done, state, {**more, "seconds": round(time.perf_counter() - clock, 3)})

    def stop(self, folder: Path, done: int) -> None:
        """Answer all requests, because the run is saved and stops after ``done`` steps.

        Args:
            folder: run folder, for the remedy.
            done: number of finished steps.
        """
        saved = {"file": str(checkpoint_folder(Path(), done))}
        late = f"the run stops after step {done}. Draw with simpletune generate --run {folder}@{done}"
        for request in list(self._waiting):
            if isinstance(request, StopRequest):
                self.stopped_by = A_REQUEST
            if isinstance(request, DrawRequest):
                self._put(request, done, "refused", {"why": late})
            else:
                self._put(request, done, "done", saved)

    def _put(self, request: AnyRequest, step: int, state: State, more: Json) -> None:
        """Record and print an answer, once."""
        assert self.folder is not None
        self._waiting = [each for each in self._waiting if each.id != request.id]
        self._answered.add(request.id)
        more = {**more, "why": redact(more["why"])} if "why" in more else more
        row = {"step": step, "id": request.id, "ask": request.ask, "state": state, **more}
        append_metrics(self.folder, row | {"at": datetime.now(UTC).isoformat(timespec="seconds")}, CONTROL_ANSWERS)
        say(f"request {request.id} ({request.ask}) at step {step}: {state} {more.get('why') or more.get('file', '')}")

    def _set_aside(self, error: UserError, status: os.stat_result) -> None:
        """Rename an unreadable control file, unless it may still be in the process of being written."""
        assert self.folder is not None
        file = self.folder / CONTROL
        if time.time() - status.st_mtime < SETTLED:
            self._mark = None  # look again after the next step
            return
        try:
            place = f"set aside as {quarantine(file).name}"
        except OSError as failed:
            place = f"left where it is ({failed.strerror})"
        self.warn(f"{error}\n{file} was {place}; nothing in it is answered")

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.folder is None or self.attempt is None:
            return
        try:
            self.look()
            late = f"training has ended. To draw now: simpletune generate --run {self.folder}"
            for request in list(self._waiting):
                self._put(request, self.attempt.last_step, "refused", {"why": late})
        except (OSError, DiskFull, UserError) as full:  # the error that ended the run matters more
            say(f"warning {self.folder / CONTROL_ANSWERS} could not be written ({full}): requests are left unanswered")
