"""SIGTERM and Ctrl-C: before training a run stops at once; while training it finishes the step, saves, and stops.

A second signal always stops at once: the first one gives both back to the system, which kills the process even in the
middle of a long computation. Nothing breaks by that: everything is written aside and renamed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(KeyboardInterrupt):
    """A run that was asked to stop has stopped, with all that can be kept on disk."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number  # as a shell tells of a process that a signal ended


class _Signals:
    """What has come and what to do about it; signals belong to the process, and so does this."""

    listening = False  # whether the handler is installed
    received: int | None = None  # the first signal that came
    deferred = False  # a signal does not raise where it comes; stop_if_asked raises later
    may_stop_in_poll = False  # while deferred, poll raises too


def _handle(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    _Signals.received = number
    if not _Signals.deferred:
        raise Stopped(number)
    text = f"\n{signal.Signals(number).name}: finishing this step and saving; a second one stops at once\n"
    with suppress(OSError):  # print may be at work in this thread: it does not bear being interrupted by itself
        os.write(2, text.encode())


@contextmanager
def listening() -> Iterator[None]:
    """Within this context SIGTERM and Ctrl-C raise ``Stopped``. Only in the main thread: elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, _handle) for each in SIGNALS}
    _Signals.received, _Signals.listening = None, True
    try:
        yield
    finally:
        _Signals.received, _Signals.listening = None, False
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def deferred_signals(processes: int) -> Iterator[None]:
    """Within this context signals wait until the loop asks for them.

    Args:
        processes: how many train together. One alone may also stop where it polls; several must stop at the same step.
    """
    _Signals.deferred, _Signals.may_stop_in_poll = True, processes == 1
    try:
        yield
    finally:
        _Signals.deferred = _Signals.may_stop_in_poll = False


def poll() -> None:
    """Where work can be left at once, because it changes nothing or is kept piece by piece: stop if it was asked.

    Before training the signal itself has raised already; what it raised is lost where Python cleans up an object.

    Raises:
        Stopped: it was.
    """
    if _Signals.received is not None and (_Signals.may_stop_in_poll or not _Signals.deferred):
        raise Stopped(_Signals.received)


def stop_if_asked() -> None:
    """Where a run may end: between its stages, and once signals are no longer deferred.

    Raises:
        Stopped: a signal came meanwhile.
    """
    if _Signals.received is not None:
        raise Stopped(_Signals.received)


def is_listening() -> bool:
    """Whether signals are heard at all."""
    return _Signals.listening


def received_signal() -> int | None:
    """The signal that this process has received."""
    return _Signals.received
