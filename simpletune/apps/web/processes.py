"""Run verbs of the command line in separate processes, which outlive the page; each has a log in ``runs/.web/logs``.

A process inherits a lock on its log, which the system releases when the process ends, however it ends. So restarted
pages, and other pages, see what is running. A file beside the log identifies the process by its ID, start time and
boot, because IDs are reused.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import json_object
from simpletune.system.atomic import machine_name, write_json
from simpletune.system.locks import UNSUPPORTED
from simpletune.system.options import Json, UserError
from simpletune.system.package import PACKAGE
from simpletune.system.portable import lock_file

LOGS = "logs"
TAIL = 2**16  # bytes of a log that are read from its end
REASON = 500  # characters of an error
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")
STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of a process that a person has stopped
UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")
LOOKS, PAUSE = 10, 0.02  # attempts to lock, and seconds in between: others hold the lock briefly to look at it
_starting = threading.Lock()
_unreaped: set[Path] = set()  # logs of this process's children whose end is not recorded yet


def start(roots: Roots, words: Sequence[str], log_name: str, module: str = "simpletune", title: str = "") -> int:
    """Start a verb with its arguments; return the process's ID, which is also its session's. The log's name is the
    process's, too, and only one of each name runs at a time. Raises UserError, which calls it ``title``, if one does,
    or if none can be started."""
    log = log_file(roots, log_name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with _starting, log.open("ab") as opened:
        if log in _unreaped or not _try_lock(opened.fileno()):
            raise UserError(f"{title or log_name} is still running. Wait for its end, or stop it")
        opened.truncate(0)
        # What `read_record` returns; `since`: seconds of the clock. `_reap` adds `code` if this page sees the end.
        record: Json = {"words": list(words), "machine": machine_name(), "since": time.time()}
        write_json(log.with_suffix(".json"), record, shared=True)
        try:
            child = spawn(roots, module, words, stdout=opened, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise UserError(f"no process could be started ({error.strerror}). End others, and try again") from None
        record |= {"pid": child.pid, "started": start_time(child.pid), "boot": _boot()}
        _unreaped.add(log)
        write_json(log.with_suffix(".json"), record, shared=True)
    threading.Thread(target=_reap, args=(child, log, record), daemon=True).start()
    return child.pid


def spawn(roots: Roots, module: str, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start ``python -m`` a module in the first root, where the page's relative paths begin; it finds this package and
    prints unbuffered."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", module, *words]  # -P: the current folder holds a user's files, not modules
    options = {"stdin": subprocess.DEVNULL, **options}
    return subprocess.Popen(command, cwd=roots.named[0], env=environment, **options)


def is_running(roots: Roots, log_name: str) -> bool:
    """Return whether the process with this name is running, whoever started it."""
    log = log_file(roots, log_name)
    try:
        with _starting, log.open("rb") as opened:
            free = _try_lock(opened.fileno(), shared=True)
    except FileNotFoundError:
        return False
    return not free or log in _unreaped or find_process(roots, log_name) is not None


def find_process(roots: Roots, log_name: str) -> int | None:
    """Return the ID of the running process with this name; None if it has ended."""
    record = read_record(roots, log_name)
    pid = record.get("pid")
    if record.get("boot") not in _boots() or not isinstance(pid, int):
        return None
    return pid if start_time(pid) == (record.get("started") or 0) else None


def send_signal(roots: Roots, log_name: str, number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to the process with this name, if it is running."""
    pid = find_process(roots, log_name)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def was_ended_by_restart(roots: Roots, log_name: str) -> bool:
    """Return whether the last process with this name ended because this machine or container was started again; False
    on a machine other than its own."""
    record = read_record(roots, log_name)
    return (
        record.get("machine") == machine_name() and record.get("boot") not in (None, *_boots()) and "code" not in record
    )


def read_record(roots: Roots, log_name: str) -> Json:
    """Return what is known of the last process with this name; empty if there was none, or the file is damaged."""
    return json_object(log_file(roots, log_name).with_suffix(".json"))


def exit_code(roots: Roots, log_name: str) -> int | None:
    """Return the exit code of the last process with this name; None while it runs, or if no page saw it end."""
    code = read_record(roots, log_name).get("code")
    return code if isinstance(code, int) else None


def tail(roots: Roots, log_name: str, lines: int) -> list[str]:
    """Return the last lines of a log; empty if there is none. For a progress bar, returns only its last state."""
    try:
        with log_file(roots, log_name).open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL))
            text = opened.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")][-lines:] if text else []


def last_error(roots: Roots, log_name: str) -> str:
    """Return the error that a process printed last, or its last line; empty if it printed nothing."""
    lines = [line for line in tail(roots, log_name, 60) if line.strip()]
    at = next((at for at in range(len(lines) - 1, -1, -1) if lines[at].startswith("error: ")), len(lines) - 1)
    return "\n".join(lines[at:])[:REASON].removeprefix("error: ") if lines else ""


def log_file(roots: Roots, log_name: str) -> Path:
    """Return the log of a name. Raises UserError if the name does not fit into a file name."""
    if not NAME.fullmatch(log_name):
        raise UserError(f"{log_name[:60]!r} is not a valid log name. Use letters, digits, '.', '_' and '-'")
    return roots.own / LOGS / f"{log_name}.log"


@lru_cache(maxsize=4096)
def job_name(kind: str, run: str) -> str:
    """Name the process and log of a verb for a run; a hash distinguishes names that do not fit."""
    plain = plain_name(run)
    return f"{kind}-{plain}" + (f"-{hashlib.sha256(run.encode()).hexdigest()[:8]}" if plain != run else "")


def plain_name(run: str) -> str:
    """Return a run's name as every file system takes it."""
    return UNUSUAL.sub("_", run)[:100]


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot (proc(5), field 22); None if it has ended, also as a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _try_lock(handle: int, shared: bool = False) -> bool:
    """Lock a log, and return whether that worked; always true on a file system without locks."""
    for _ in range(1 if shared else LOOKS):
        try:
            lock_file(handle, shared)
            return True
        except BlockingIOError:
            time.sleep(0 if shared else PAUSE)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return True
    return False


def _reap(child: subprocess.Popen[bytes], log: Path, record: Json) -> None:
    code = child.wait()
    with _starting:
        write_json(log.with_suffix(".json"), {**record, "code": code}, shared=True)
        _unreaped.discard(log)


def _boots() -> tuple[str, str]:
    """Return this boot, and as version 0.1 first recorded it: without the first process."""
    return _boot(), _boot().split()[0]


def _boot() -> str:
    """Identify this start of the machine or, by its first process, of this container."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='utf-8').strip()} {start_time(1)}"
