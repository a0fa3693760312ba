"""What is in folders of pictures: each is scanned once until it changes, beside the page, which answers at once and
says how far the scan is. A large folder is scanned by a process of its own, because a thread would slow the page."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from simpletune.apps.web import processes
from simpletune.apps.web.roots import Roots
from simpletune.commands.init import FolderContents, inspect_folder
from simpletune.commands.init.choices import data_fields
from simpletune.commands.inspect_data.scan import DatasetReport, scan_dataset
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.system.console import progress_to
from simpletune.system.options import UserError

WAIT = 2.0  # seconds in which most folders are scanned; a page that waits longer shows how far it is
AT_ONCE, KEPT = 2, 8  # scans under way, and results in memory
UNASKED = 300.0  # seconds after which a scan that no page asks for ends
FEW = 400  # files of a folder that this process scans itself
STATTED = 20_000  # files whose times are compared; beyond them, only names and the times of folders are
EVERY = 0.2  # seconds between two messages of a process about how far it is

Found = TypeVar("Found")
Kind = Literal["folder", "data set"]
SKIPS = ("data.on_error",)  # fields that change nothing in a scan, which leaves out what cannot be used
FAILED = "The scan failed; the terminal that runs this page says why"


@dataclass
class ImageScan(Generic[Found]):
    """A scan, under way or ended."""

    version: str  # of the files that it reads
    found: Found | None = None  # once it has ended, unless there is a problem
    problem: str = ""  # why nothing was found
    done: int = 0  # pictures so far
    total: int = 0  # pictures; 0 until they are counted
    ended: threading.Event = field(default_factory=threading.Event)
    asked: float = field(default_factory=time.monotonic)  # when a page last asked for it
    unwanted: bool = False

    @property
    def is_running(self) -> bool:
        return not self.ended.is_set()

    @property
    def words(self) -> str:
        """How far it is."""
        if not self.total:
            return "Looking at the folder: counting its files"
        return f"Looking at the folder: {self.done:,} of {self.total:,} pictures"

    def run(self, scan: Callable[[], Found | None]) -> None:
        try:
            self.found = scan()
        except UserError as reason:
            self.problem = str(reason)
        finally:
            if self.found is None and not self.problem:
                self.problem = FAILED
            self.ended.set()

    def scan_here(self, kind: Kind, text: str) -> Found | None:
        """Scan in this process."""
        with progress_to(self.count):
            return _examine(kind, text)

    def scan_in_child(self, roots: Roots, kind: Kind, text: str) -> Found | None:
        """Scan in a process of its own, which ends once nobody asks any more."""
        child = processes.spawn(roots, __name__, [kind, text], stdout=subprocess.PIPE)
        threading.Thread(target=self._end_unwanted, args=(child,), daemon=True).start()
        with child:
            assert child.stdout is not None
            for what, value in _messages(child.stdout):
                if what == "found":
                    return value
                if what == "problem":
                    raise UserError(value)
                self.count(*value)
        return None

    def count(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def _end_unwanted(self, child: subprocess.Popen[bytes]) -> None:
        while not self.ended.wait(1):
            if time.monotonic() - self.asked > UNASKED:
                self.unwanted = True
            if self.unwanted:
                child.kill()
                return


class Scans:
    """The latest scans of the folders that pages show."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._scans: dict[tuple[Kind, str], ImageScan[Any]] = {}  # the one asked for last at the end
        self._lock = threading.Lock()

    def scan_folder(
        self, folder: Path, chosen: Mapping[str, object] | None = None, wait: float = WAIT
    ) -> ImageScan[FolderContents]:
        """Scan a folder as ``simpletune init`` does; ``chosen``: fields that the user's answers set."""
        fields = {path: value for path, value in (chosen or {}).items() if value is not None and path not in SKIPS}
        return self._look("folder", json.dumps([str(folder), fields]), folder, wait)

    def scan_data_set(self, config: TrainConfig, folder: Path, wait: float = WAIT) -> ImageScan[DatasetReport]:
        """Scan the folder of a configuration."""
        return self._look("data set", config.model_dump_json(by_alias=True), folder, wait)

    def close(self) -> None:
        """End what is under way; returns at once."""
        with self._lock:
            for scan in self._scans.values():
                scan.unwanted = True

    def _look(self, kind: Kind, text: str, folder: Path, wait: float) -> ImageScan[Any]:
        version, count = version_of(folder)
        with self._lock:
            scan = self._scans.pop((kind, text), None)
            if scan is None or scan.version != version or scan.unwanted:
                if scan is not None:
                    scan.unwanted = True
                scan = ImageScan(version)
                work = partial(scan.scan_here, kind, text)
                if count > FEW:
                    work = partial(scan.scan_in_child, self._roots, kind, text)
                threading.Thread(target=scan.run, args=(work,), name="scan", daemon=True).start()
            scan.asked = time.monotonic()
            self._scans[kind, text] = scan
            is_running = [each for each in self._scans.values() if each.is_running]
            for each in is_running[:-AT_ONCE]:
                each.unwanted = True
            for old in [key for key, each in self._scans.items() if not each.is_running][:-KEPT]:
                del self._scans[old]
        scan.ended.wait(wait)
        return scan


def version_of(folder: Path) -> tuple[str, int]:
    """Return a name for the state of a folder's files, which changes when one of them does, and how many there are."""
    digest, count, waiting = hashlib.sha256(), 0, [os.fspath(folder)]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as listed:
                entries = sorted((each for each in listed if not each.name.startswith(".")), key=lambda each: each.name)
            digest.update(os.fsencode(f"{here}\0{os.stat(here).st_mtime_ns}\0"))
        except OSError:  # the scan says so
            digest.update(b"unreadable\0")
            continue
        for entry in entries:
            digest.update(os.fsencode(entry.name) + b"\0")
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            count += 1
            if count <= STATTED:
                digest.update(_times(entry))
    return digest.hexdigest(), count


def _times(entry: os.DirEntry[str]) -> bytes:
    try:
        found = entry.stat()
    except OSError:  # a link to nothing
        return b"missing\0"
    return f"{found.st_mtime_ns} {found.st_size}\0".encode()


def _examine(kind: Kind, text: str) -> Any:
    if kind == "folder":
        folder, chosen = json.loads(text)
        return inspect_folder(Path(folder), data_fields(chosen))
    return scan_dataset(validate(json.loads(text), "the configuration", needs_data=False, needs_model=False), 0)


def _messages(pipe: Any) -> Iterator[tuple[str, Any]]:
    while True:
        try:
            yield pickle.load(pipe)
        except EOFError:  # it was ended, or has failed
            return


def main() -> None:
    """Scan what the arguments say, and write messages to standard output: (``done``, (done, total)) from time to time,
    then (``found``, what was found) or (``problem``, why nothing was)."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no message
    lock, due = threading.Lock(), [0.0]

    def tell(what: str, value: object) -> None:
        with lock:
            pickle.dump((what, value), pipe)
            pipe.flush()

    def count(done: int, total: int) -> None:
        if time.monotonic() >= due[0] or done == total:
            due[0] = time.monotonic() + EVERY
            tell("done", (done, total))

    kind: Kind = "folder" if sys.argv[1] == "folder" else "data set"
    try:
        with progress_to(count):
            found = _examine(kind, sys.argv[2])
    except UserError as reason:
        tell("problem", str(reason))
    else:
        tell("found", found)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the page has ended
        main()
