"""The queues of queues.c from Python: push work on a stream, wait for it, choose the adversary's seed."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import torch

PAGEABLE, PINNED, DEVICE, MANAGED = range(4)
AT_ONCE = -1
"""The seed that runs work when it is queued, in the order of the program."""

_free = ctypes.CDLL(None)  # gives up the GIL: calls that may wait
_held = ctypes.PyDLL(None)  # keeps it: calls that return at once
_free.soft_push.argtypes = [ctypes.c_void_p, ctypes.c_long]
_free.soft_finish.argtypes = [ctypes.c_void_p]
_free.soft_seed.argtypes = [ctypes.c_long]
_held.soft_place.argtypes = [ctypes.c_void_p]
_held.soft_read_back.restype = ctypes.c_long
_held.soft_captures.argtypes = [ctypes.c_void_p]
_Numbered = ctypes.CFUNCTYPE(None, ctypes.c_long)

Work = Callable[[], object]
_numbers = count()
_waiting: dict[int, Work] = {}
_in_graphs: dict[int, Work] = {}
_failures: list[BaseException] = []

read_back = _held.soft_read_back
captures = _held.soft_captures
is_queued, place, current_stream = _held.soft_is_queued, _held.soft_place, torch._C._cuda_getCurrentRawStream


def _operate(number: int) -> None:
    collects = gc.isenabled()
    gc.disable()  # a finaliser that waits for the device must not run in the thread that does the device's work
    try:
        work = _in_graphs.get(number) or _waiting.pop(number)
        work()
    except BaseException as error:  # raised by the next call of the program, as a card's errors are
        _failures.append(error)
    finally:
        if collects:
            gc.enable()


def _forget(number: int) -> None:
    del _in_graphs[number]


_OPERATE, _FORGET = _Numbered(_operate), _Numbered(_forget)
_held.soft_on_forget(_FORGET)


@contextmanager
def muted() -> Iterator[None]:
    """Disable the operators' launches and copies; ``read_back`` counts their reads in the context."""
    _held.soft_mute(1)
    try:
        yield
    finally:
        _held.soft_mute(-1)


def raise_failures() -> None:
    """Raise the errors of work done since the last call."""
    if _failures:
        failure = _failures[0]
        _failures.clear()
        raise failure


def push(stream: int, work: Work) -> None:
    """Queue work on a stream; without an adversary, do it. In a capture, it becomes a part of the graph."""
    recorded = captures(stream)
    if not recorded and not is_queued():
        work()
        return
    number = next(_numbers)
    (_in_graphs if recorded else _waiting)[number] = work
    _free.soft_push(stream, number)
    raise_failures()


def finish(stream: int) -> None:
    """Wait for all work of a stream."""
    if captures(stream):
        raise RuntimeError("softgpu: the host waits for a stream that captures a graph")
    if is_queued():
        _free.soft_finish(stream)
        raise_failures()


def seed(number: int) -> None:
    """Finish all work, and start a new order.

    Args:
        number: the adversary's seed; ``AT_ONCE`` for none.
    """
    _free.soft_seed(number)
    raise_failures()


def serve() -> None:
    """Start the thread that does the work."""

    def run() -> None:
        with torch.inference_mode():  # tensors of both kinds may be written
            _free.soft_serve(_OPERATE)

    threading.Thread(target=run, name="softgpu", daemon=True).start()
    while not _held.soft_is_serving():  # before that, nothing waits
        time.sleep(1e-4)


stop = _free.soft_stop
