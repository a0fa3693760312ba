"""Keep a run in an object store: fetch it, take it over, and upload it while it trains."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from simpletune.config.schema import TrainConfig, run_folder, run_url
from simpletune.runs.checkpoint_folders import checkpoint_folder, list_checkpoints
from simpletune.runs.remote.index import (
    INDEX,
    RunIndex,
    StoredCheckpoint,
    link,
    linked_run,
    read_index,
    require_same_run,
    stored_words,
    take,
)
from simpletune.runs.remote.upload import LEFT_OUT, Uploader, damaged_copy, damaged_here
from simpletune.system.atomic import atomic_folder
from simpletune.system.checksums import sha256_of
from simpletune.system.console import progress, say
from simpletune.system.disk import format_bytes
from simpletune.system.locks import wait_for_lock
from simpletune.system.options import UserError
from simpletune.system.processes import is_first_process
from simpletune.system.signals import poll
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import StoreError, send_with_retries


class CheckpointStore(Protocol):
    """By what a run reports its checkpoints; does nothing by itself."""

    def note_start(self, step: int) -> None:
        """Note that training begins after this many steps."""
        return

    def note_saved(self, step: int) -> None:
        """Note that a checkpoint has been written."""
        return


class LocalOnly(CheckpointStore):
    """For a run that is kept only in its folder."""


class DamagedFile(StoreError):
    """Report that a stored file is missing or differs from what was uploaded."""


@contextmanager
def open_checkpoint_store(config: TrainConfig, resume: str | None) -> Iterator[CheckpointStore]:
    """Keep a run in the object store that ``output.runs`` names within this context; upload the last files at the end.
    Does nothing if ``output.runs`` is a folder.

    Args:
        config: the configuration as the user gave it.
        resume: ``latest``, ``auto``, a checkpoint's folder, or None for a new run.

    Raises:
        UserError: the store cannot be used, already has a run of this name, or another process takes the run over.
    """
    url, folder = run_url(config), run_folder(config)
    if url is None:
        yield LocalOnly()
        return
    store = ObjectStore(url)
    try:
        if resume in ("auto", "latest"):
            with wait_for_lock(folder.with_name(f".{folder.name}.fetch.lock"), "fetch   waiting for another process"):
                fetch(store, folder)
        owned = take(store, lambda stored: _take_over(store, folder, stored, resume)) if is_first_process() else None
    except StoreError as error:
        raise UserError(f"output.runs: {error}. Check the URL, the credentials and the network") from None
    if owned is None:
        yield LocalOnly()
        return
    index, tag = owned
    with Uploader(store, folder, index, tag, config.checkpoint) as uploader:
        yield uploader


def _take_over(store: ObjectStore, folder: Path, stored: RunIndex | None, resume: str | None) -> RunIndex:
    """Take a run over, and return its index, unless a new run would replace a stored one."""
    owner, machine = uuid.uuid4().hex, socket.gethostname()
    if stored is None:  # a new run, or one that has been deleted from the store
        known = linked_run(folder) if resume is not None else None
        return RunIndex(run=known or uuid.uuid4().hex, owner=owner, machine=machine)
    if stored.checkpoints and resume is None:
        raise UserError(
            f"output.runs: {store.url} already holds a run ({stored_words(stored)}). Use --resume auto to continue it, "
            "or give this run another name: name=..."
        )
    if stored.checkpoints:
        require_same_run(folder, store.url, stored.run)
    files = damaged_here(folder, stored.files)
    return RunIndex(run=stored.run, owner=owner, machine=machine, checkpoints=stored.checkpoints, files=files)


def fetch(store: ObjectStore, folder: Path) -> None:
    """Bring a run's folder to the state of the stored run, if there is one, unless the folder has later checkpoints.
    Skips a damaged checkpoint with a warning; an older one is then the newest."""
    found = read_index(store)
    if found is None:
        return
    index, _ = found
    say(f"store   {store.url}: {stored_words(index)}, by {index.machine} since {index.since:%Y-%m-%d %H:%M:%S} UTC")
    if index.checkpoints:
        require_same_run(folder, store.url, index.run)
        _fetch_missing(store, index, folder)
        link(folder, store.url, index.run)


def _fetch_missing(store: ObjectStore, index: RunIndex, folder: Path) -> None:
    here = [step for step, _ in list_checkpoints(folder)]
    missing = {step: each for step, each in index.checkpoints.items() if step not in here}
    if not missing or (here and here[-1] >= max(index.checkpoints)):
        again = damaged_here(folder, index.files)  # an earlier start could not read them
        sizes = send_with_retries(store.keys) if again else {}
        for key in sorted(again.keys() & sizes.keys()):
            _fetch_run_file(store, index, key, sizes[key], folder)
        return
    size = sum(file.size for each in missing.values() for file in each.files.values())
    say(f"fetch   {store.url}: {format_bytes(size)}")
    with progress("fetch", sum(len(each.files) for each in missing.values()), "files") as advance:
        for step, stored in sorted(missing.items(), reverse=True):
            try:
                _fetch_checkpoint(store, stored, checkpoint_folder(folder, step), advance)
            except DamagedFile as damage:
                say(f"warning {damage}: the checkpoint of step {step} is left out")
    if not list_checkpoints(folder):
        raise UserError(
            f"--resume: none of the checkpoints in {store.url} is intact. Restore them, or start a new run under "
            "another name: name=..."
        )
    if index.files or index.arriving:
        sizes = send_with_retries(store.keys)
        for key in sorted({**index.files, **index.arriving}):
            if key in sizes:
                _fetch_run_file(store, index, key, sizes[key], folder)
            elif key in index.files:  # or else its first upload did not end
                say(f"warning {store.url}/{key} has been deleted: it is left out")
            poll()
        return
    for key, size in send_with_retries(store.keys).items():  # of a run stored before its index named them
        parts = key.split("/")
        if parts[0] in (*LEFT_OUT, INDEX) or any(part in ("", ".", "..") for part in parts):
            continue
        send_with_retries(partial(store.fetch, key, folder / key, size))
        poll()


def _fetch_run_file(store: ObjectStore, index: RunIndex, key: str, size: int, folder: Path) -> None:
    """Fetch a file of the run that is as it was uploaded. A damaged one is kept under another name, with a warning."""
    known = {file.sha256 for file in (index.files.get(key), index.arriving.get(key)) if file is not None}
    place = damaged_copy(folder / key)

    def fetch_and_check() -> None:
        store.fetch(key, place, size)
        if sha256_of(place) not in known:
            raise DamagedFile(f"{store.url}/{key} is damaged (its checksum does not match)")

    try:
        send_with_retries(fetch_and_check)
    except DamagedFile as damage:
        say(f"warning {damage}: it is left out, and kept as {place}")
    else:
        place.replace(folder / key)


def _fetch_checkpoint(store: ObjectStore, stored: StoredCheckpoint, target: Path, advance: Callable[[], None]) -> None:
    """Fetch a checkpoint whole or not at all."""
    with atomic_folder(target, "fetching a checkpoint") as part:
        for name in stored.files:
            _fetch_file(store, stored, name, part)
            advance()
            poll()


def _fetch_file(store: ObjectStore, stored: StoredCheckpoint, name: str, folder: Path) -> None:
    known, key = stored.files[name], f"{stored.folder}/{name}"

    def fetch_and_check() -> None:
        store.fetch(key, folder / name, known.size)
        if sha256_of(folder / name) != known.sha256:
            raise DamagedFile(f"{store.url}/{key} is damaged (its checksum does not match)")

    try:
        send_with_retries(fetch_and_check)
    except StoreError:
        there = send_with_retries(partial(store.keys, f"{stored.folder}/"))  # raises if there is no answer
        if key not in there:
            raise DamagedFile(f"{store.url}/{key} is missing") from None
        if there[key] != known.size:
            raise DamagedFile(f"{store.url}/{key} has {there[key]} bytes instead of {known.size}") from None
        raise
