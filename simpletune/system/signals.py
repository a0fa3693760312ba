"""Handle SIGTERM and Ctrl-C: stop at once before training; during training, finish the step, save and stop.

A second signal always stops at once: the first restores the system's default for both, which kills the process even
during a long computation. That is safe, because all files are written under temporary names and renamed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from simpletune.system.processes import progressed

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(KeyboardInterrupt):
    """Report that a signal stopped the run and that everything worth keeping was saved.

    Args:
        number: the signal; for a request to stop, the signal that it counts as.
        by: what stopped the run, if not the signal.
    """

    def __init__(self, number: int, by: str | None = None):
        self.by = by or signal.Signals(number).name
        super().__init__(f"stopped by {self.by}")
        self.code = 128 + number  # a shell's exit code for a signal


class Signals:
    """The received signal and how to react to it, for the whole process."""

    listening = False  # whether the handler is installed
    received: int | None = None  # the first signal
    deferred = False  # the handler does not raise; stop_if_asked raises later
    may_stop_in_poll = False  # while deferred, poll may raise


def _handle(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    Signals.received = number
    if not Signals.deferred:
        raise Stopped(number)
    text = f"\n{signal.Signals(number).name}: finishing this step and saving; a second one stops at once\n"
    with suppress(OSError):  # not print, which is not reentrant and may be running in this thread
        os.write(2, text.encode())


@contextmanager
def handle_signals() -> Iterator[None]:
    """Make SIGTERM and Ctrl-C raise ``Stopped`` within this context; do nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, _handle) for each in SIGNALS}
    Signals.received, Signals.listening = None, True
    try:
        yield
    finally:
        Signals.received, Signals.listening = None, False
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def defer_signals(processes: int) -> Iterator[None]:
    """Defer signals within this context until the loop checks for them. A single process may also stop in ``poll``;
    several that train together must stop at the same step."""
    Signals.deferred, Signals.may_stop_in_poll = True, processes == 1
    try:
        yield
    finally:
        Signals.deferred = Signals.may_stop_in_poll = False


def poll() -> None:
    """Count progress, and stop if a signal was received, during work that can be interrupted anywhere."""
    progressed.count += 1
    # Before training, the handler raises by itself, but Python loses an exception raised while it finalises an object.
    if Signals.received is not None and (Signals.may_stop_in_poll or not Signals.deferred):
        raise Stopped(Signals.received)


def stop_if_requested() -> None:
    """Stop if a signal was received, between stages of a run and after deferring signals."""
    if Signals.received is not None:
        raise Stopped(Signals.received)
