"""Interruptions of a run that do not change its bits: signals, and requests in its control file (generate, save, stop).

The first of several processes reads the file, at the cost of one ``stat`` per step, and sends what it found to the
others with the step's figures, so that all of them stop after the same step.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.checkpoint_folders import checkpoint_folder
from simpletune.runs.control import (
    AnyRequest,
    GenerateRequest,
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
from simpletune.system.shell import quote_command
from simpletune.system.signals import SIGNALS, Signals
from simpletune.training.pending_steps import NOTHING, InterruptFlags

SETTLED = 2.0  # seconds for which an unreadable file may still be in the process of being written
A_REQUEST = "a request"


class Interrupts:
    """Watches signals and a run's control file, and answers it; as a context manager, refuses at the end what is left.

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
        self.asked = NOTHING
        """What was asked of this process at the last ``poll``."""
        self._began = attempt.all[-1].started if attempt is not None else datetime.now(UTC)
        self._answered = set() if folder is None else answered_ids(folder)
        self._waiting: list[AnyRequest] = []
        self._mark: tuple[int, ...] | None = None
        self.agreed = False
        """Whether all processes know of the requests, have logged every step, and have yet to answer."""
        self._stop_asked = False

    def poll(self) -> InterruptFlags:
        """Return what is asked of this process now."""
        self._read()
        stops = sum(isinstance(request, StopRequest) for request in self._waiting)
        self._stop_asked = stops > 0
        self.asked = InterruptFlags(Signals.received is not None or self._stop_asked, len(self._waiting) > stops)
        return self.asked

    def ending_signal(self, asked: bool) -> int | None:
        """Return the signal that ends the run after the last launched step, the same in all processes; SIGINT for a
        request. ``asked``: whether any process was asked to stop when the steps that are logged now were launched."""
        # Several processes stop together at the first such step; a single one also for what has arrived since.
        if not (asked or (self.alone and (Signals.received is not None or self._stop_asked))):
            return None
        return Signals.received or (signal.SIGINT if self._stop_asked else SIGNALS[0])

    @property
    def ready(self) -> bool:
        """Whether requests can be answered after this step: several processes must first have logged the same steps."""
        return self.asked.answer and (self.alone or self.agreed)

    def _read(self) -> None:
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
        generate: Callable[[GenerateRequest, int], tuple[State, Json]],
    ) -> None:
        """Carry out the requests after ``done`` steps, except stopping.

        Args:
            saved: whether this step is already saved.
            generate: generates a picture, and returns the answer.

        Raises:
            Stopped: a signal arrived while generating.
        """
        self.agreed = False
        for request in [each for each in self._waiting if not isinstance(each, StopRequest)]:
            clock = time.perf_counter()
            if isinstance(request, SaveRequest):
                if not saved:
                    save(done)
                saved = True
                state: State = "done"
                more: Json = {"file": str(checkpoint_folder(Path(), done))}
            else:
                state, more = generate(request, done)
            self._put(request, done, state, {**more, "seconds": round(time.perf_counter() - clock, 3)})

    def stop(self, folder: Path, done: int) -> None:
        """Answer all requests, because the run is saved and stops after ``done`` steps."""
        saved = {"file": str(checkpoint_folder(Path(), done))}
        generate = quote_command("simpletune", "generate", "--run", f"{folder}@{done}")
        late = f"the run stops after step {done}. Draw with {generate}"
        for request in list(self._waiting):
            if isinstance(request, StopRequest):
                self.stopped_by = A_REQUEST
            if isinstance(request, GenerateRequest):
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

    def __enter__(self) -> Interrupts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.folder is None or self.attempt is None:
            return
        try:
            self._read()
            late = f"training has ended. To draw now: {quote_command('simpletune', 'generate', '--run', self.folder)}"
            for request in list(self._waiting):
                self._put(request, self.attempt.last_step, "refused", {"why": late})
        except (OSError, DiskFull, UserError) as full:  # the error that ended the run matters more
            say(f"warning {self.folder / CONTROL_ANSWERS} could not be written ({full}): requests are left unanswered")
