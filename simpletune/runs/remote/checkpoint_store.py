"""Keep a run in an object store: fetch it, take it over, and upload it while it trains."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from simpletune.config.schema import TrainConfig, run_folder, run_url
from simpletune.system.locks import wait_for_lock
from simpletune.system.options import UserError
from simpletune.system.processes import is_first_process

if TYPE_CHECKING:
    from simpletune.runs.remote.index import RunIndex
    from simpletune.system.stores.object_store import ObjectStore


class CheckpointStore(Protocol):
    """By what a run reports its checkpoints; does nothing by itself."""

    def begins(self, step: int) -> None:
        """Training begins after this many steps."""
        return

    def saved(self, step: int) -> None:
        """A checkpoint has been written."""
        return


class LocalOnly(CheckpointStore):
    """For a run that is kept only in its folder."""


@contextmanager
def open_checkpoint_store(config: TrainConfig, resume: str | None) -> Iterator[CheckpointStore]:
    """Within this context, keep a run in the object store that ``output.runs`` names; upload the last files at the end.
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
    from simpletune.runs.remote.fetch import fetch
    from simpletune.runs.remote.index import take
    from simpletune.runs.remote.upload import Uploader
    from simpletune.system.stores.object_store import ObjectStore
    from simpletune.system.stores.store import StoreError

    store = ObjectStore(url)
    try:
        if resume in ("auto", "latest"):
            with wait_for_lock(folder.with_name(f".{folder.name}.fetch.lock"), "fetch   waiting for another process"):
                fetch(store, folder)
        owned = take(store, lambda stored: _owned(store, folder, stored, resume)) if is_first_process() else None
    except StoreError as error:
        raise UserError(f"output.runs: {error}. Check the URL, the credentials and the network") from None
    if owned is None:
        yield LocalOnly()
        return
    index, tag = owned
    with Uploader(store, folder, index, tag, config.checkpoint) as uploader:
        yield uploader


def _owned(store: ObjectStore, folder: Path, stored: RunIndex | None, resume: str | None) -> RunIndex:
    """The index with which this process takes a run over, unless a new run would replace a stored one."""
    from simpletune.runs.remote.index import RunIndex, require_same_run, stored_words

    owner, machine = uuid.uuid4().hex, socket.gethostname()
    if stored is None:
        return RunIndex(owner=owner, machine=machine)
    if stored.checkpoints and resume is None:
        raise UserError(
            f"output.runs: {store.url} already holds a run ({stored_words(stored)}). Use --resume auto to continue it, "
            "or give this run another name: name=..."
        )
    if stored.checkpoints:
        require_same_run(folder, store.url, stored.run)
    return RunIndex(run=stored.run, owner=owner, machine=machine, checkpoints=stored.checkpoints)
