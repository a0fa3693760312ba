"""Define named points at which a test can kill or fail a run; an unused failpoint costs one comparison.

In a process, call ``arm("checkpoint.before-rename", action)``. From outside, set the environment variable
``SIMPLETUNE_FAILPOINT`` to a comma-separated list of ``NAME[:COUNT]=ACTION``. COUNT 3 acts at the third pass; ACTION is
one of ACTIONS.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

VARIABLE = "SIMPLETUNE_FAILPOINT"
NAMES = {
    "run.moved-traces": "an older run's traces are moved, but not its folder",
    "run.cleared": "an entry of a run without a checkpoint is removed",
    "run.opened-again": "metrics beyond the checkpoint are dropped, but not evaluations",
    "data.scanned": "pictures and captions are read, but not encoded",
    "text.encoded": "a prompt is in the cache",
    "class.drawn": "a class picture is in the cache",
    "latents.encoded": "a picture is in the cache",
    "file.before-rename": "a weight file is written and flushed, but not renamed",
    "file.after-rename": "a weight file is renamed",
    "quantised.before-rename": "a quantised base is written, but not renamed",
    "model.loaded": "the base model is loaded",
    "run.restored": "the checkpoint is restored into the model",
    "step.begun": "a step begins",
    "step.updated": "the weights are updated, but the step is not logged",
    "metrics.appended": "the step is logged",
    "checkpoint.begun": "a checkpoint's temporary folder is created, but empty",
    "checkpoint.part": "a process has written its part of divided weights, but not of the optimizer",
    "checkpoint.weights": "a checkpoint's weights are written, but not its optimizer",
    "checkpoint.optimizer": "a checkpoint's optimizer is written, but not its state.json",
    "checkpoint.before-rename": "a checkpoint is complete, but not renamed",
    "checkpoint.after-rename": "a checkpoint is renamed, but older ones are not removed",
    "checkpoint.removing": "an older checkpoint is renamed, but its files are not removed",
    "validation.evaluated": "the validation loss is recorded, but no picture is drawn",
    "validation.picture": "a validation picture is written to the temporary folder",
    "validation.drawn": "the pictures of a step are written, but not the grid",
    "shard.written": "a shard is written beside its samples, but not renamed",
    "shard.joined": "a shard is written, but not in its place",
    "shard.stored": "a shard is stored, but its samples still lie beside it",
    "shard.cleared": "a shard is stored and its samples removed, but no index names it",
    "remote.file": "a file of a checkpoint is in the object store, but others are not",
    "remote.uploaded": "a checkpoint is in the object store, but its index does not name it",
    "remote.committed": "the object store's index names a new checkpoint, but older ones are not removed",
    "remote.fetched": "a checkpoint is fetched, but not renamed",
    "finish.saved": "the last checkpoint is written, but not the result",
    "finish.exported": "the result is written",
    "finish.summary": "the summary is written for the first time, but not the card and the report",
    "finish.reported": "the report is written, but not the final summary",
}


class InjectedError(RuntimeError):
    """Report a failure injected by a failpoint."""


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
_active = False  # whether anything is armed or watched


def failpoint(name: str) -> None:
    """Pass a named point: notify the watcher and run an armed action."""
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
    """Run an action at a named point, once.

    Args:
        name: one of NAMES.
        action: one of ACTIONS, or a function.
        count: number of the pass at which to act.

    Raises:
        ValueError: the name or the action is unknown.
    """
    global _active
    if name not in NAMES:
        raise ValueError(f"unknown failpoint {name}. Use one of {', '.join(NAMES)}")
    if isinstance(action, str) and action not in ACTIONS:
        raise ValueError(f"unknown failpoint action {action}. Use one of {', '.join(ACTIONS)}")
    _armed[name] = (count, ACTIONS[action] if isinstance(action, str) else action)
    _active = True


def watch(watcher: Callable[[str], None]) -> None:
    """Call a function at every point, before any armed action."""
    global _active, _watcher
    _watcher, _active = watcher, True


def disarm() -> None:
    """Remove all armed actions and the watcher."""
    global _active, _watcher
    _armed.clear()
    _watcher, _active = None, False


def arm_all(text: str) -> None:
    """Arm the failpoints of ``SIMPLETUNE_FAILPOINT``.

    Raises:
        ValueError: an entry is not ``NAME[:COUNT]=ACTION``.
    """
    for part in text.split(","):
        moment, equals, action = part.strip().partition("=")
        name, _, count = moment.partition(":")
        if not equals or (count and not count.isdigit()):
            raise ValueError(f"{VARIABLE}: {part!r} is not NAME[:COUNT]=ACTION")
        arm(name, action, int(count or 1))


if VARIABLE in os.environ:
    arm_all(os.environ[VARIABLE])
