"""The queue of runs: ``runs/.web/queue.json``, which pages and the runner read and write as a whole, under a lock.
``queue_runner.py`` processes it in a separate process, so that it continues when the page is closed or killed.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from simpletune.apps.web import processes
from simpletune.apps.web.roots import Roots
from simpletune.system.atomic import flush_to_disk, quarantine, write_json
from simpletune.system.locks import wait_for_lock
from simpletune.system.options import Json, UserError

FILE, LOCK, RUNNER = "queue.json", ".queue.lock", "queue"
RUNNER_MODULE = "simpletune.apps.web.queue_runner"
ENDED_KEPT = 20  # ended runs that stay in the queue to be looked at
MOST = 500  # waiting runs
PAUSE = 10.0  # seconds until another runner is started
CPU, GPU = "cpu", "gpu"
State = Literal["waiting", "running", "finished", "stopped", "failed", "killed"]


def log_name(name: str) -> str:
    """Return the name of a run's log."""
    return f"run-{name}"


def _queueable(name: str) -> str:
    if not all(map(processes.NAME.fullmatch, (name, log_name(name)))):
        rule = "Rename its folder with letters, digits, '.', '_' and '-'"
        raise ValueError(f"{name[:60]!r} cannot be trained from this page. {rule}")
    return name


class QueueEntry(BaseModel):
    """A run in the queue."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    id: str
    """Random; names the entry in the page's forms."""
    name: Annotated[str, AfterValidator(_queueable)]
    """Name of the run and of its folder; its log has it, too."""
    config: str
    """Path of its configuration."""
    device: Literal["cpu", "gpu"]
    """The device that it needs; each trains one run at a time."""
    resume: bool = False
    """Continue the run of this name instead of starting a new one."""
    state: State = "waiting"
    """Its state."""
    reason: str = ""
    """Why it failed."""
    restarts: int = 0
    """How often the machine has restarted while it ran."""


_ENTRIES = TypeAdapter(list[QueueEntry])


@dataclass(frozen=True)
class OtherEntry:
    """An entry that this version cannot use: one of a newer version, or a damaged one. It is left as it is."""

    value: object  # as the file has it
    fields: str  # what cannot be used

    @property
    def id(self) -> str:
        """To remove it by; empty if it has none."""
        return self._text("id")

    @property
    def name(self) -> str:
        return self._text("name")

    def _text(self, key: str) -> str:
        found = self.value.get(key) if isinstance(self.value, dict) else None
        return found if isinstance(found, str) else ""


class DamagedQueue(UserError):
    """The queue's file cannot be read."""


def read_queue(roots: Roots) -> list[QueueEntry]:
    """Return all entries in order, also ended ones. Raises UserError if the file is damaged, or of a newer version."""
    return read_all(roots)[0]


def read_all(roots: Roots) -> tuple[list[QueueEntry], list[OtherEntry]]:
    """Read the entries, as ``read_queue`` does, and those that this version cannot use."""
    file = roots.own / FILE
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        return [], []
    except (ValueError, RecursionError) as error:
        raise DamagedQueue(
            f"{file} is damaged ({str(error)[:200]}). The next change sets it aside as "
            f"{FILE}.damaged and starts a new queue; runs are not affected"
        ) from None
    if not isinstance(values, list):
        raise UserError(f"{file} is no list of runs: a newer version wrote it. Use that version, or move the file away")
    entries, others = [], []
    for value in values:
        try:
            entries.append(QueueEntry.model_validate(value))
        except ValidationError as error:  # such an entry must not stop those that wait
            wrong = {
                str(each["loc"][0]) for each in error.errors(include_url=False, include_input=False) if each["loc"]
            }
            others.append(OtherEntry(value, ", ".join(sorted(wrong))[:200]))
    return entries, others


def change(
    roots: Roots, to: Callable[[list[QueueEntry]], list[QueueEntry]], dropped: str | None = None
) -> list[QueueEntry]:
    """Replace the entries by the result of ``to``, while no other process changes them; drops old ended ones. Entries
    that this version cannot use stay, but for that of the ID ``dropped``."""
    roots.own.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(roots.own / LOCK, "waiting for another page to write the queue"):
        try:
            entries, others = read_all(roots)
        except DamagedQueue:
            quarantine(roots.own / FILE)
            entries, others = [], []
        changed = to(entries)
        ended = [each.id for each in changed if each.state not in ("waiting", "running")]
        old = set(ended[:-ENDED_KEPT])
        changed = [each for each in changed if each.id not in old]
        kept = [each for each in others if each.id != dropped]
        if changed != entries or kept != others:
            values = [*_ENTRIES.dump_python(changed, mode="json"), *(each.value for each in kept)]
            write_json(roots.own / FILE, values)
            flush_to_disk(roots.own)  # the new name, too, before anyone is told
        return changed


def add(roots: Roots, name: str, config: Path, device: str, resume: bool = False) -> QueueEntry:
    """Append a run to the queue, and make sure that a runner processes the queue. The configuration must exist until
    the run has begun; ``device`` is the result of ``queue_device``. Raises UserError if the queue is full, or the name
    unfit."""
    try:
        _queueable(name)
    except ValueError as error:
        raise UserError(str(error)) from None
    entry = QueueEntry(
        id=secrets.token_hex(6), name=name, config=str(config), device="cpu" if device == CPU else "gpu", resume=resume
    )

    def append(entries: list[QueueEntry]) -> list[QueueEntry]:
        if sum(each.state == "waiting" for each in entries) >= MOST:
            raise UserError(f"{MOST} runs are waiting. Remove some from the queue")
        return [*entries, entry]

    change(roots, append)
    ensure_runner(roots)
    return entry


def remove(roots: Roots, which: str) -> None:
    """Remove an entry from the queue, unless it is running."""
    change(roots, lambda entries: [each for each in entries if each.id != which or each.state == "running"], which)


def move_up(roots: Roots, which: str) -> None:
    """Swap an entry with the waiting one before it."""

    def swap(entries: list[QueueEntry]) -> list[QueueEntry]:
        waiting = [at for at, each in enumerate(entries) if each.state == "waiting"]
        here = next((at for at in waiting if entries[at].id == which), None)
        before = [at for at in waiting if here is not None and at < here]
        if here is None or not before:
            return entries
        changed = list(entries)
        changed[here], changed[before[-1]] = changed[before[-1]], changed[here]
        return changed

    change(roots, swap)


def stop(roots: Roots, which: str) -> None:
    """Ask a running entry to finish its step, save and stop."""
    entry = next((each for each in read_queue(roots) if each.id == which and each.state == "running"), None)
    if entry is not None:
        processes.send_signal(roots, log_name(entry.name))


def ensure_runner(roots: Roots) -> None:
    """Start the queue's runner if there is something to do and none is running."""
    if not is_open(roots) or processes.is_running(roots, RUNNER):
        return
    if processes.exit_code(roots, RUNNER) not in (0, None):  # it failed, as on a full disk; another would fail, too
        failed = processes.log_file(roots, RUNNER).with_suffix(".json").stat().st_mtime
        if time.time() - failed < PAUSE:
            return
    try:
        processes.start(roots, [str(roots.runs), str(roots.named[0])], RUNNER, RUNNER_MODULE)
    except UserError:  # another page was faster
        if not processes.is_running(roots, RUNNER):
            raise


def is_open(roots: Roots) -> bool:
    """Return whether an entry is waiting or running."""
    try:
        return any(each.state in ("waiting", "running") for each in read_queue(roots))
    except UserError:
        return False


def queue_device(settings: Json) -> str:
    """Return which device a configuration trains on: ``cpu`` or ``gpu``."""
    model = settings.get("model")
    is_demo = isinstance(model, dict) and str(model.get("pretrained", "")).startswith("demo:")
    on_cpu = settings.get("device", "auto") == "cpu" or (is_demo and shutil.which("nvidia-smi") is None)
    return CPU if on_cpu else GPU
