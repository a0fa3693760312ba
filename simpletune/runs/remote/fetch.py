"""Fetch a run's folder from an object store if this machine's copy is missing or older."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from simpletune.runs.checkpoint_folders import checkpoint_folder, list_checkpoints
from simpletune.runs.remote.index import INDEX, RunIndex, StoredCheckpoint
from simpletune.runs.remote.link import require_same_run
from simpletune.runs.remote.upload import LEFT_OUT
from simpletune.system.atomic import atomic_folder
from simpletune.system.checksums import sha256_of
from simpletune.system.console import progress, say
from simpletune.system.disk import format_bytes
from simpletune.system.options import UserError
from simpletune.system.signals import poll
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import StoreError, send_with_retries


def fetch(store: ObjectStore, index: RunIndex, folder: Path) -> None:
    """Bring a run's folder to the state of the stored run, unless the folder has later checkpoints. Skips a damaged
    checkpoint with a warning; an older one is then the newest.

    Args:
        store: the run's folder there.
        index: its index.
        folder: the run's folder here.

    Raises:
        UserError: the folder here belongs to another run, or no stored checkpoint is intact.
        StoreError: the store does not answer.
    """
    require_same_run(folder, store.url, index.run)
    here = [step for step, _ in list_checkpoints(folder)]
    missing = {step: each for step, each in index.checkpoints.items() if step not in here}
    if not missing or (here and here[-1] >= max(index.checkpoints)):
        return
    _fetch_checkpoints(store, missing, folder)
    if not list_checkpoints(folder):
        raise UserError(
            f"--resume: none of the checkpoints in {store.url} is intact. Restore them, or start a new run under "
            "another name: name=..."
        )
    _fetch_files(store, folder)


def _fetch_checkpoints(store: ObjectStore, missing: dict[int, StoredCheckpoint], folder: Path) -> None:
    size = sum(file.size for each in missing.values() for file in each.files.values())
    say(f"fetch   {store.url}: {format_bytes(size)}")
    with progress("fetch", sum(len(each.files) for each in missing.values()), "files") as advance:
        for step, stored in sorted(missing.items(), reverse=True):
            try:
                _fetch_checkpoint(store, stored, checkpoint_folder(folder, step), advance)
            except DamagedFile as damage:
                say(f"warning {damage}: the checkpoint of step {step} is left out")


def _fetch_checkpoint(store: ObjectStore, stored: StoredCheckpoint, target: Path, advance: Callable[[], None]) -> None:
    """Fetch a checkpoint whole or not at all.

    Raises:
        Damaged: one of its files is missing or differs from what was uploaded.
        StoreError: the store does not answer.
    """
    with atomic_folder(target, "fetching a checkpoint") as part:
        for name in stored.files:
            _fetch_file(store, stored, name, part)
            advance()
            poll()


class DamagedFile(StoreError):
    """Report that a stored file is missing or differs from what was uploaded."""


def _fetch_file(store: ObjectStore, stored: StoredCheckpoint, name: str, folder: Path) -> None:
    """Fetch a file of a checkpoint.

    Raises:
        Damaged: it differed from what was uploaded in every attempt.
        StoreError: the store does not answer.
    """
    known, key = stored.files[name], f"{stored.folder}/{name}"

    def fetch_and_check() -> None:
        store.fetch(key, folder / name, known.size)
        if sha256_of(folder / name) != known.sha256:
            raise DamagedFile(f"{store.url}/{key} is damaged (its checksum does not match)")

    try:
        send_with_retries(fetch_and_check)
    except StoreError:
        there = store.keys(f"{stored.folder}/")  # raises if the store does not answer at all
        if key not in there:
            raise DamagedFile(f"{store.url}/{key} is missing") from None
        if there[key] != known.size:
            raise DamagedFile(f"{store.url}/{key} has {there[key]} bytes instead of {known.size}") from None
        raise


def _fetch_files(store: ObjectStore, folder: Path) -> None:
    """Fetch the run's other files: metrics, samples, configuration."""
    for key, size in store.keys().items():
        parts = key.split("/")
        if parts[0] in (*LEFT_OUT, INDEX) or any(part in ("", ".", "..") for part in parts):
            continue
        send_with_retries(partial(store.fetch, key, folder / key, size))
        poll()
