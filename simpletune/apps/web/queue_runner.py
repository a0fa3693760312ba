"""Process the queue: ``python -m simpletune.apps.web.queue_runner RUNS ROOT``. Ends when nothing is waiting or running.

Killing a runner loses nothing: the queue is a file, runs are separate processes, and the next runner, which any open
page starts, finds them by their logs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from simpletune.apps.web import processes, queue
from simpletune.apps.web.queue import CPU, GPU, QueueEntry, State, log_name
from simpletune.apps.web.roots import Roots, make_roots
from simpletune.apps.web.run_state import state_of
from simpletune.runs.attempts import attempts_of
from simpletune.system.console import say
from simpletune.system.locks import is_held
from simpletune.system.options import UserError

PERIOD = 1.0  # seconds between two looks
STOPPED = (130, 143)  # exit codes of a run stopped by a signal
REASON = 500  # characters
ENDINGS: dict[str, State] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


def step(roots: Roots) -> None:
    """Look at the queue once: record runs that have ended, and start those that may start."""
    outcomes = {each.id: run_outcome(roots, each) for each in queue.read_queue(roots) if each.state == "running"}
    ended = {which: found for which, found in outcomes.items() if found is not None}
    if ended:
        _record(roots, ended)
        for state, reason in ended.values():
            say(f"{state} {reason}")
    queue.change(roots, lambda entries: [_adopt(roots, each) for each in entries])
    busy = busy_devices(roots)
    for entry in queue.read_queue(roots):
        if entry.state != "waiting" or entry.device in busy:
            continue
        # a run of this name may still be training, or its log still be written
        if not is_held(roots.runs / entry.name) and not processes.running(roots, log_name(entry.name)):
            busy.add(entry.device)
            begin(roots, entry)


def begin(roots: Roots, entry: QueueEntry) -> None:
    """Start an entry's run, unless a page has removed the entry meanwhile."""

    def mark(entries: list[QueueEntry]) -> list[QueueEntry]:
        waits = any(each.id == entry.id and each.state == "waiting" for each in entries)
        if waits:  # within the lock: a runner that is killed here leaves a run that its successor starts or finds
            processes.start(roots, train_words(entry), log_name(entry.name))
            say(f"start {entry.name}")
        return [_with(each, "running") if waits and each.id == entry.id else each for each in entries]

    try:
        queue.change(roots, mark)
    except UserError as error:
        _record(roots, {entry.id: ("failed", str(error))})


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


def run_outcome(roots: Roots, entry: QueueEntry) -> tuple[State, str] | None:
    """Return how a started run ended, and why; None while it is running."""
    if processes.running(roots, log_name(entry.name)):
        return None
    code = processes.exit_code(roots, log_name(entry.name))
    if code is None:  # no runner saw it end: look in its folder
        folder = roots.run(entry.name)
        found = state_of(folder) if folder is not None else None
        word = ENDINGS.get(found.word, "killed") if found is not None else "killed"
        return word, last_error(roots, entry) if word in ("failed", "killed") else ""
    if code == 0:
        return "finished", ""
    if code in STOPPED:
        return "stopped", ""
    return ("killed", f"signal {-code}") if code < 0 else ("failed", last_error(roots, entry))


def last_error(roots: Roots, entry: QueueEntry) -> str:
    """Return the error that a run printed last, or its last line."""
    lines = [line for line in processes.tail(roots, log_name(entry.name), 60) if line.strip()]
    at = next((at for at in range(len(lines) - 1, -1, -1) if lines[at].startswith("error: ")), len(lines) - 1)
    return "\n".join(lines[at:])[:REASON].removeprefix("error: ") if lines else ""


def train_words(entry: QueueEntry) -> list[str]:
    """Return the command of an entry's run."""
    return ["train", entry.config, *(["--resume", "auto"] if entry.resume else [])]


def _adopt(roots: Roots, entry: QueueEntry) -> QueueEntry:
    """Mark an entry as running if a runner started its run but was killed before recording it."""
    name = log_name(entry.name)
    if entry.state != "waiting" or processes.read_record(roots, name).get("words") != train_words(entry):
        return entry
    return _with(entry, "running") if processes.running(roots, name) else entry


def _record(roots: Roots, outcomes: Mapping[str, tuple[State, str]]) -> None:
    """Write how entries ended, by their IDs."""
    queue.change(
        roots, lambda entries: [_with(each, *outcomes[each.id]) if each.id in outcomes else each for each in entries]
    )


def _with(entry: QueueEntry, state: State, reason: str = "") -> QueueEntry:
    return entry.model_copy(update={"state": state, "reason": reason})


if __name__ == "__main__":
    roots = make_roots(Path(sys.argv[1]), [Path(sys.argv[2])])
    while queue.is_open(roots):
        step(roots)
        time.sleep(PERIOD)
