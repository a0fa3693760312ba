"""Process the queue: ``python -m simpletune.apps.web.queue_runner RUNS ROOT``. Ends when nothing is waiting or running.

Killing a runner loses nothing: the queue is a file, runs are separate processes, and the next runner, which a server
starts when it starts and for any open page, finds them by their logs. A run that a restart of the machine ended waits
again, in its old place, and continues from its last checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from simpletune.apps.web import processes, queue
from simpletune.apps.web.queue import CPU, GPU, QueueEntry, State, log_name
from simpletune.apps.web.roots import Roots, make_roots
from simpletune.apps.web.run_state import state_of
from simpletune.runs.attempts import attempts_of
from simpletune.system.console import say
from simpletune.system.locks import is_held
from simpletune.system.notify import Message, post_now, receiver_or_none
from simpletune.system.options import UserError

PERIOD = 1.0  # seconds between two looks
STOPPED = (130, 143)  # exit codes of a run stopped by a signal
MOST_RESTARTS = 5  # of the machine during a run: more, and the run may be their cause
ENDINGS: dict[str, State] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


def step(roots: Roots) -> None:
    """Look at the queue once: record runs that have ended, and start those that may start."""
    running = [each for each in queue.read_queue(roots) if each.state == "running"]
    ended = [found for each in running if (found := ended_entry(roots, each)) is not None]
    if ended:
        _record(roots, ended)
        for entry in ended:
            say(f"{entry.name}: {entry.state} {entry.reason}".rstrip())
            unposted = entry.state == "killed" or (entry.state == "failed" and not has_begun(roots, entry))
            if unposted and (receiver := receiver_or_none()) is not None:  # a run that has begun posts its end itself
                post_now(receiver, Message(entry.name, entry.state, entry.reason or "no reason known"))
    queue.change(roots, lambda entries: [_adopt(roots, each) for each in entries])
    busy = busy_devices(roots)
    for entry in queue.read_queue(roots):
        if entry.state != "waiting" or entry.device in busy:
            continue
        # a run of this name may still be training, or its log still be written
        if not is_held(roots.runs / entry.name) and not processes.is_running(roots, log_name(entry.name)):
            busy.add(entry.device)
            begin(roots, entry)


def begin(roots: Roots, entry: QueueEntry) -> None:
    """Start an entry's run, unless a page has removed the entry meanwhile."""

    def mark(entries: list[QueueEntry]) -> list[QueueEntry]:
        waits = any(each.id == entry.id and each.state == "waiting" for each in entries)
        if waits:  # within the lock: a runner that is killed here leaves a run that its successor starts or finds
            processes.start(roots, train_words(entry), log_name(entry.name))
            say(f"start {entry.name}")
        return [_with_state(each, "running") if waits and each.id == entry.id else each for each in entries]

    try:
        queue.change(roots, mark)
    except UserError as error:
        _record(roots, [_with_state(entry, "failed", str(error))])


def busy_devices(roots: Roots) -> set[str]:
    """Return the devices on which runs are training, whoever started them."""
    busy: set[str] = {each.device for each in queue.read_queue(roots) if each.state == "running"}
    for folder in roots.all_runs():
        if not is_held(folder):
            continue
        if attempts := attempts_of(folder):
            busy.add(CPU if attempts[-1].device.startswith("cpu") else GPU)
        else:
            busy.add(queue.queue_device(state_of(folder).settings))
    return busy


def ended_entry(roots: Roots, entry: QueueEntry) -> QueueEntry | None:
    """Return the entry of a started run as its end leaves it: waiting again if this machine was restarted meanwhile;
    None while it is running."""
    log = log_name(entry.name)
    if processes.is_running(roots, log):
        return None
    code = processes.exit_code(roots, log)
    if code is None:  # no runner saw it end: look in its folder
        folder = roots.run(entry.name)
        restarted = processes.was_ended_by_restart(roots, log)
        begun = folder is not None and (not restarted or has_begun(roots, entry))
        word = ENDINGS.get(state_of(folder).word, "killed") if folder is not None and begun else "killed"
        if restarted and word in ("killed", "stopped"):  # an orderly shutdown stops runs
            return _restart(entry, begun)
        return _with_state(entry, word, processes.last_error(roots, log) if word in ("failed", "killed") else "")
    if code == 0:
        return _with_state(entry, "finished")
    if code in STOPPED:
        return _with_state(entry, "stopped")
    return (
        _with_state(entry, "killed", f"signal {-code}")
        if code < 0
        else _with_state(entry, "failed", processes.last_error(roots, log))
    )


def has_begun(roots: Roots, entry: QueueEntry) -> bool:
    """Return whether the folder of a started run is its own: a new run moves an older one of its name away late."""
    since = processes.read_record(roots, log_name(entry.name)).get("since")
    attempts = attempts_of(roots.runs / entry.name)
    return bool(attempts) and isinstance(since, float) and attempts[-1].started.timestamp() >= int(since)


def _restart(entry: QueueEntry, begun: bool) -> QueueEntry:
    """Let a run that a restart of the machine ended continue, or begin again if it had not begun."""
    restarts = entry.restarts + 1
    if restarts > MOST_RESTARTS:
        return _with_state(
            entry, "failed", f"The machine restarted {restarts} times while it ran. Continue it on its page"
        )
    changes = {"state": "waiting", "resume": entry.resume or begun, "restarts": restarts}
    return entry.model_copy(update=changes)


def train_words(entry: QueueEntry) -> list[str]:
    """Return the command of an entry's run."""
    return ["train", entry.config, *(["--resume", "auto"] if entry.resume else [])]


def _adopt(roots: Roots, entry: QueueEntry) -> QueueEntry:
    """Mark an entry as running if a runner started its run but was killed before recording it."""
    name = log_name(entry.name)
    if entry.state != "waiting" or processes.read_record(roots, name).get("words") != train_words(entry):
        return entry
    return _with_state(entry, "running") if processes.is_running(roots, name) else entry


def _record(roots: Roots, ended: Sequence[QueueEntry]) -> None:
    """Write how entries ended."""
    by_id = {each.id: each for each in ended}
    queue.change(roots, lambda entries: [by_id.get(each.id, each) for each in entries])


def _with_state(entry: QueueEntry, state: State, reason: str = "") -> QueueEntry:
    return entry.model_copy(update={"state": state, "reason": reason})


if __name__ == "__main__":
    roots = make_roots(Path(sys.argv[1]), [Path(sys.argv[2])])
    while queue.is_open(roots):
        step(roots)
        time.sleep(PERIOD)
