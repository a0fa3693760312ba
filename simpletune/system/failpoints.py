"""Named moments at which a test can kill or fail a run; where none is asked for, passing one costs a comparison.

In a process: ``arm("checkpoint.before-rename", action)``. From outside: the environment variable
``SIMPLETUNE_FAILPOINT`` as ``NAME[:COUNT]=ACTION``, several with commas between; COUNT 3 acts at the third passing, and
ACTION is one of ACTIONS.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

VARIABLE = "SIMPLETUNE_FAILPOINT"
NAMES = {
    "run.moved-traces": "an older run's traces are moved aside, its folder is not yet",
    "run.cleared": "what a run without a checkpoint left is removed",
    "run.opened-again": "metrics beyond the checkpoint are dropped, evaluations are not yet",
    "data.scanned": "pictures and captions are read, nothing is encoded",
    "text.encoded": "a prompt is in the cache",
    "latents.encoded": "a picture is in the cache",
    "file.before-rename": "a weight file is written aside and flushed, not yet renamed",
    "file.after-rename": "a weight file has its name",
    "quantised.before-rename": "a quantised base is written aside",
    "model.loaded": "the base model is loaded",
    "run.restored": "the checkpoint is in the model",
    "step.begun": "a step begins",
    "step.updated": "weights are updated, the step is not written down",
    "metrics.appended": "the step is written down",
    "checkpoint.begun": "a checkpoint's folder is made aside, empty",
    "checkpoint.weights": "a checkpoint's weights are written, its optimizer is not",
    "checkpoint.optimizer": "its optimizer is written, its state.json is not",
    "checkpoint.before-rename": "a checkpoint is written aside, whole",
    "checkpoint.after-rename": "a checkpoint has its name, older ones are not removed",
    "checkpoint.removing": "an older checkpoint is out of the way, its files are not removed",
    "validation.evaluated": "the evaluation loss is written, no picture is drawn",
    "validation.picture": "a validation picture is written, aside",
    "validation.drawn": "the pictures of a step are there, the grid is not",
    "finish.saved": "the last checkpoint is there, the result is not",
    "finish.exported": "the result is there",
    "finish.summary": "the summary is written for the first time, the card and the report are not",
    "finish.reported": "the report is written, the summary not for the last time",
}


class InjectedError(RuntimeError):
    """What a failpoint raises when told to."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise InjectedError("a failpoint raised")


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": _kill,
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "raise": _raise,
    "full": _full,
}
_armed: dict[str, tuple[int, Callable[[], object]]] = {}
_watcher: Callable[[str], None] | None = None
_active = False  # anything armed or watched


def failpoint(name: str) -> None:
    """A run passes a named moment."""
    if not _active:
        return
    if _watcher is not None:
        _watcher(name)
    if name in _armed:
        left, action = _armed[name]
        if left > 1:
            _armed[name] = (left - 1, action)
        else:
            del _armed[name]
            action()


def arm(name: str, action: str | Callable[[], object] = "kill", count: int = 1) -> None:
    """Act at a named moment, once.

    Args:
        name: one of NAMES.
        action: one of ACTIONS, or a function.
        count: at which passing.

    Raises:
        ValueError: there is no such moment or action.
    """
    global _active
    if name not in NAMES:
        raise ValueError(f"{name} is no failpoint. Use one of {', '.join(NAMES)}")
    if isinstance(action, str) and action not in ACTIONS:
        raise ValueError(f"{action} is no action of a failpoint. Use one of {', '.join(ACTIONS)}")
    _armed[name] = (count, ACTIONS[action] if isinstance(action, str) else action)
    _active = True


def watch(watcher: Callable[[str], None]) -> None:
    """Be told of every moment that is passed, before anything armed there acts."""
    global _active, _watcher
    _watcher, _active = watcher, True


def disarm() -> None:
    """Forget everything armed and watched."""
    global _active, _watcher
    _armed.clear()
    _watcher, _active = None, False


def arm_all(text: str) -> None:
    """Arm what ``SIMPLETUNE_FAILPOINT`` says.

    Raises:
        ValueError: it does not say ``NAME[:COUNT]=ACTION``.
    """
    for part in text.split(","):
        moment, equals, action = part.strip().partition("=")
        name, _, count = moment.partition(":")
        if not equals or (count and not count.isdigit()):
            raise ValueError(f"{VARIABLE}: {part!r} is not NAME[:COUNT]=ACTION")
        arm(name, action, int(count or 1))


if VARIABLE in os.environ:
    arm_all(os.environ[VARIABLE])
