"""Upload a run's folder in the background, one complete checkpoint after another."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from simpletune.config.checkpoint import Checkpoint
from simpletune.runs.best_checkpoint import step_to_keep
from simpletune.runs.checkpoint_folders import STATE, checkpoint_folder, list_checkpoints, read_state
from simpletune.runs.folder import REMOTE, SUMMARY
from simpletune.runs.remote.index import (
    LostRun,
    RunIndex,
    StoredCheckpoint,
    StoredFile,
    link,
    linked_run,
    put_index,
)
from simpletune.system.atomic import remove
from simpletune.system.checksums import sha256_of
from simpletune.system.console import duration, say
from simpletune.system.disk import format_bytes
from simpletune.system.options import UserError
from simpletune.system.signals import Stopped
from simpletune.system.stores.object_store import ObjectStore

STAGED = ".upload.part"  # links to the checkpoint that is being uploaded; the next start removes a leftover
LEFT_OUT = ("checkpoints", "wandb", REMOTE)  # checkpoints are uploaded by the index; wandb uploads its own files
DAMAGED = ".damaged"  # ends the name of a fetched file whose checksum did not match; it is kept on this machine only
IN_MEMORY = 2**24  # bytes of a file that is read before it is uploaded, since it may be replaced meanwhile
AGAIN, LONGEST = 1.0, 60.0  # seconds until the first and between later attempts after a failure
SOON, REMINDED = 2.0, 30.0  # seconds before a run that has ended first says what it waits for, and between reminders
AT_STOP, AT_FAILURE, AT_END = 100.0, 60.0, 1800.0  # seconds that the last upload may take when a run ends


def damaged_here(folder: Path, files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """Choose the stored files of which this machine has nothing but a damaged copy: what it read may be at fault, so
    the stored ones stay until it writes its own. Not the summary, without which a run is only finished again."""
    return {
        key: file
        for key, file in files.items()
        if key != SUMMARY and not (folder / key).exists() and damaged_copy(folder / key).exists()
    }


def damaged_copy(file: Path) -> Path:
    """Return where a file that does not match its checksum is kept."""
    return file.with_name(file.name + DAMAGED)


@dataclass(frozen=True)
class UploadJob:
    """What the next upload sends to the store, besides the run's other files."""

    step: int | None = None  # of the checkpoint; None: no checkpoint
    staged: Path | None = None  # folder with links to its files
    finished: bool = False  # whether the run is


class Uploader:
    """Keeps a copy of a run's folder in an object store.

    A thread uploads; training waits for it only at the end. If an upload takes longer than the time between two
    checkpoints, the newest waiting checkpoint is uploaded next and the ones in between are skipped.

    Args:
        store: the run's folder there.
        folder: the run's folder here.
        index: the index, which this process owns.
        tag: its ETag.
        keeps: which checkpoints to keep.
    """

    def __init__(self, store: ObjectStore, folder: Path, index: RunIndex, tag: str | None, keeps: Checkpoint):
        self.store, self.folder, self.keeps = store, folder, keeps
        self.index, self._tag = index, tag
        self.uploaded, self.seconds = 0, 0.0
        self._stored: dict[str, tuple[int, int]] = {}  # size and time of change of the files as last uploaded, by key
        self._arrived: dict[str, StoredFile] = {}  # what this process has uploaded last under each key
        self._waiting: UploadJob | None = None
        self._stagings = 0
        self._start: int | None = None  # step from which this process trains; None: it does not
        self._failure: BaseException | None = None
        self._sending: tuple[str, int, float] | None = None  # the file's key, its size in bytes, and since when
        self._changed = threading.Condition()
        self._busy = self._ends = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def __enter__(self) -> Uploader:
        remove(self.folder / STAGED)  # left by a killed process
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = isinstance(error, LostRun) or isinstance(self._failure, LostRun)
        # A run that has not saved yet may have an older run of the same name in its folder.
        linked = linked_run(self.folder) == self.index.run
        if not lost and linked:
            patience = AT_END if error is None else AT_STOP if isinstance(error, Stopped) else AT_FAILURE
            self._upload_rest(patience, finished=error is None)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        remove(self.folder / STAGED)
        if error is not None or not linked:
            return
        if isinstance(self._failure, LostRun):
            raise self._failure
        if not self._is_done():
            reason = f" ({self._failure or self._describe_wait(time.monotonic())})"
            raise UserError(
                f"output.runs: the run is finished in {self.folder}, but not all of it could be uploaded to "
                f"{self.store.url}{reason}. Run the same command with --resume auto to upload the rest"
            )
        say(f"upload  {self.store.url}: {format_bytes(self.uploaded)} in {duration(self.seconds)}, during training")

    def note_start(self, step: int) -> None:
        """Replace the stored checkpoints after this step, which training writes again: they may be damaged."""
        self._start = step

    def note_saved(self, step: int) -> None:
        """Upload a new checkpoint, and the run's other files. LostRun: another process has taken over the run."""
        if isinstance(self._failure, LostRun):
            raise self._failure
        link(self.folder, self.store.url, self.index.run)
        self._queue(step)

    def _queue(self, step: int | None, finished: bool = False) -> None:
        """Upload a checkpoint and the run's other files next; replaces what waits."""
        staged = None
        if step is not None:  # links to its files, because the run may soon remove the checkpoint
            self._stagings += 1
            staged = self.folder / STAGED / f"{self._stagings}"
            staged.mkdir(parents=True)
            for file in checkpoint_folder(self.folder, step).iterdir():
                try:
                    os.link(file, staged / file.name)
                except OSError:  # the file system has no links
                    shutil.copy2(file, staged / file.name)
        with self._changed:
            if self._waiting is not None and self._waiting.staged is not None:
                remove(self._waiting.staged)
            self._waiting = UploadJob(step, staged, finished)
            self._changed.notify_all()

    def _upload_rest(self, patience: float, finished: bool) -> None:
        """Upload everything that is left, waiting at most ``patience`` seconds."""
        found = list_checkpoints(self.folder)
        self._queue(found[-1][0] if found else None, finished)
        began = time.monotonic()
        due = began + SOON
        while not self._is_done() and (now := time.monotonic()) - began < patience:
            if now >= due:
                due = now + REMINDED
                left = f"It waits at most {duration(began + patience - now)} more"
                leave = "Ctrl-C leaves it, and --resume auto uploads it"
                say(f"upload  the rest to {self.store.url}: {self._describe_wait(now)}. {left}. {leave}")
            time.sleep(0.05)  # short, so that signals are handled at once

    def _describe_wait(self, now: float) -> str:
        """Describe what the upload is doing."""
        with self._changed:
            sending, failure = self._sending, self._failure
        if sending is not None:
            key, size, since = sending
            return f"{key} ({format_bytes(size)}) has been on its way for {duration(now - since)}"
        return f"tries again after a failure ({failure})" if failure else "waits for an answer"

    def _is_done(self) -> bool:
        with self._changed:
            return isinstance(self._failure, LostRun) or (self._waiting is None and not self._busy)

    def _work(self) -> None:
        """Upload waiting jobs, and retry after a failure, until the run ends."""
        pause = AGAIN
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._ends)
                job, self._waiting = self._waiting, None
                self._busy = job is not None
            if job is None:
                return
            began = time.monotonic()
            try:
                self._upload(job)
            except LostRun as lost:
                with self._changed:
                    self._failure, self._busy = lost, False
                return
            except Exception as error:  # a failed upload must not fail the run; it is reported and retried
                if self._failure is None and not self._ends:
                    say(f"warning {error}. Training continues, and the upload is retried")
                with self._changed:
                    self._failure, self._busy = error, False
                    if self._waiting is None:
                        self._waiting = job
                    elif job.staged is not None:  # a newer checkpoint waits
                        remove(job.staged)
                    self._changed.wait_for(lambda: self._ends, timeout=pause)
                pause = min(2 * pause, LONGEST)
            else:
                if self._failure is not None:
                    say(f"upload  {self.store.url} accepts files again")
                self.seconds += time.monotonic() - began
                with self._changed:
                    self._failure, self._busy = None, False
                pause = AGAIN

    def _upload(self, job: UploadJob) -> None:
        """Upload the run's files, then a checkpoint, then name it in the index; then remove what is no longer kept."""
        files = self._upload_files()
        checkpoints = dict(self.index.checkpoints)
        if job.step is not None and job.staged is not None:
            # Those after the step that this process began with are its own, or from an attempt that went on further.
            checkpoints = {
                step: each
                for step, each in checkpoints.items()
                if step <= job.step and (self._start is None or step <= self._start or each.folder == self._place(step))
            }
            if job.step not in checkpoints:
                checkpoints[job.step] = self._upload_checkpoint(job.step, job.staged)
        best = step_to_keep(self.folder)
        stay = {*self.keeps.steps_to_keep(sorted(checkpoints)), best}
        kept = {known: each for known, each in sorted(checkpoints.items()) if known in stay}
        self._commit(checkpoints=kept, finished=job.finished, files=files, arriving={})
        self._arrived = {key: file for key, file in self._arrived.items() if not key.startswith("checkpoints/")}
        if job.staged is not None:
            remove(job.staged)
            # Remove what the index does not name: old checkpoints, and those of killed uploads.
            named = {each.folder for each in kept.values()}
            there = self.store.keys("checkpoints/")
            if old := [key for key in there if "/".join(key.split("/")[:2]) not in named]:
                self._commit(always=True)  # this process still owns the run, so what it has listed is no later owner's
                self.store.remove(old)

    def _commit(self, *, always: bool = False, **changes: object) -> None:
        index = self.index.model_copy(update=changes)
        if always or index != self.index:
            self._tag = put_index(self.store, index, self._tag)
            self.index = index

    def _place(self, step: int) -> str:
        """Return the key prefix of a checkpoint that this process uploads; no other process writes there."""
        return f"checkpoints/step-{step:06d}.{self.index.owner[:8]}"

    def _upload_files(self) -> dict[str, StoredFile]:
        """Upload the files of the run, apart from checkpoints, that have changed since they were last uploaded, and
        return all of them, with those that are intact only in the store. The index names them first: whatever becomes
        of this process, it knows what is there."""
        files, changed = dict[str, StoredFile](), dict[str, tuple[int, int]]()
        # not rglob, which fails if a checkpoint is removed meanwhile
        found = [Path(place, name) for place, _, names in os.walk(self.folder) for name in names]
        for file in sorted(found):
            key = file.relative_to(self.folder).as_posix()
            if key.partition("/")[0] in LEFT_OUT or any(part.startswith(".") for part in key.split("/")):
                continue
            try:
                status = file.stat()
                seen = status.st_size, status.st_mtime_ns
                if not file.is_file() or file.name.endswith(DAMAGED):
                    continue
                if self._stored.get(key) == seen and key in self.index.files:
                    files[key] = self.index.files[key]
                    continue
                files[key] = StoredFile(size=status.st_size, sha256=sha256_of(file, status.st_size))
            except FileNotFoundError:  # replaced or removed meanwhile; the next upload sends what is there then
                continue
            changed[key] = seen
        self._commit(arriving={key: files[key] for key in changed})
        for key, seen in changed.items():
            file, size = self.folder / key, files[key].size
            content: Path | bytes = file
            if size <= IN_MEMORY or key.endswith(".jsonl"):  # rows that are appended meanwhile are sent the next time
                try:
                    with open(file, "rb") as handle:
                        content = handle.read(size)
                except FileNotFoundError:
                    del files[key]
                    continue
                files[key] = StoredFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
            self._put(content, key, files[key])
            self._stored[key] = seen
        return damaged_here(self.folder, self.index.files) | files

    def _upload_checkpoint(self, step: int, staged: Path) -> StoredCheckpoint:
        sums: Mapping[str, str] = read_state(staged / STATE)["sha256"]
        files = {
            file.name: StoredFile(size=file.stat().st_size, sha256=sums.get(file.name) or sha256_of(file))
            for file in sorted(staged.iterdir())
        }
        stored = StoredCheckpoint(folder=self._place(step), files=files)
        for name, known in files.items():
            self._put(staged / name, f"{stored.folder}/{name}", known)
        return stored

    def _put(self, file: Path | bytes, key: str, known: StoredFile) -> None:
        """Upload a file, unless an earlier attempt has."""
        if self._arrived.get(key) != known:
            self._sending = key, known.size, time.monotonic()
            try:
                self.store.upload(file, key)
            finally:
                self._sending = None
            self.uploaded += known.size
            self._arrived[key] = known
