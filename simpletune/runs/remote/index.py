"""A run's index in an object store: which process owns the run, and which checkpoints are complete.

A checkpoint counts once the index names it. A process replaces the index only if nobody else has since it read it, so
two machines that continue the same run cannot mix their checkpoints: the first one notices that it has lost the run
when it commits its next checkpoint. A run's folder names the stored run that it belongs to in its ``remote.json``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import REMOTE
from simpletune.system.atomic import write_json
from simpletune.system.options import UserError, plural
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import ObjectChanged, StoreError, send_with_retries

INDEX = "index.json"
READS = 3  # attempts to read a damaged index
TAKES = 8  # attempts to take a run over


def _require_inside(key: str) -> str:
    """Check that a path stays in the folder it is relative to, on every system."""
    parts = key.split("/")
    if any(part in ("", ".", "..") or part != part.strip() for part in parts) or not key.isprintable() or "\\" in key:
        raise ValueError("leads out of the run's folder")
    return key


class StoredFile(BaseModel):
    """A file as it was uploaded."""

    model_config = ConfigDict(frozen=True)

    size: int
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class StoredCheckpoint(BaseModel):
    """A complete checkpoint."""

    model_config = ConfigDict(frozen=True)

    folder: str = Field(pattern=r"^checkpoints/[A-Za-z0-9.-]+$")  # its key prefix
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")], StoredFile]


RunFiles = dict[Annotated[str, AfterValidator(_require_inside)], StoredFile]
"""Files of a run apart from checkpoints, by their path in its folder."""


class RunIndex(BaseModel):
    """The content of ``index.json``."""

    model_config = ConfigDict(frozen=True)

    version: int = 1
    run: str = Field(default_factory=lambda: uuid.uuid4().hex)  # identifies the run across all its attempts
    owner: str  # identifies the process that may write
    machine: str  # where that process runs, for messages
    since: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))  # when it took over
    checkpoints: dict[int, StoredCheckpoint] = {}  # the complete ones by step
    files: RunFiles = {}  # the run's other files; empty in runs stored before November 2026
    arriving: RunFiles = {}  # those that are being uploaded: the store may hold these, or still those of ``files``
    finished: bool = False  # whether the run's result is stored


class LostRun(UserError):
    """Report that another process has taken over the run, or that it has been deleted from the store (None)."""

    def __init__(self, url: str, index: RunIndex | None):
        super().__init__(
            f"{url} has been continued on {index.machine} since {index.since:%Y-%m-%d %H:%M:%S} UTC, so this process "
            "stops. Its own files stay in its folder. Stop one of the two, or give this run another name: name=..."
            if index
            else f"{url}/{INDEX} has been deleted while this process trained, so it stops. Its own files stay in its "
            "folder. Run the same command with --resume auto to continue and to store all of them again"
        )


def read_index(store: ObjectStore) -> tuple[RunIndex, str | None] | None:
    """Read the index of a run and its ETag; None if there is none. Raises UserError if it is damaged or newer than
    this."""
    place = f"{store.url}/{INDEX}"
    for left in reversed(range(READS)):
        found = send_with_retries(lambda: store.read(INDEX))
        if found is None:
            return None
        content, tag = found
        try:
            index = RunIndex.model_validate_json(content)
            break
        except ValidationError as error:
            if not left:  # read again: an answer may have been cut short
                reason = plural(error.error_count(), "error")
                raise UserError(f"{place} is damaged ({reason}). Restore it, or use another name: name=...") from None
    if index.version != 1:
        raise UserError(f"{place} has version {index.version}; this simpletune reads version 1. Update simpletune")
    return index, tag


def put_index(store: ObjectStore, index: RunIndex, known: str | None) -> str | None:
    """Replace the index that this process last read or wrote, with the ETag ``known``; returns the new ETag. LostRun:
    another process has written it since."""
    content = index.model_dump_json(indent=2).encode()
    while True:
        try:
            return store.replace(INDEX, content, known)
        except ObjectChanged:
            found = read_index(store)
            if found is None or found[0].owner != index.owner:
                raise LostRun(store.url, found[0] if found else None) from None
            if found[0] == index:  # the first answer was lost, and the request was repeated
                return found[1]
            known = found[1]


def take(store: ObjectStore, change: Callable[[RunIndex | None], RunIndex]) -> tuple[RunIndex, str | None]:
    """Replace the index, regardless of its owner, by what ``change`` makes of it; returns the new one and its ETag."""
    for _ in range(TAKES):
        found = read_index(store)
        index = change(found[0] if found else None)
        try:
            content = index.model_dump_json(indent=2).encode()
            return index, store.replace(INDEX, content, found[1] if found else None)
        except ObjectChanged:
            continue  # another process has written it in between, or an answer was lost
    raise StoreError(f"{store.url}/{INDEX} keeps changing: several processes are starting this run at once")


def stored_words(index: RunIndex) -> str:
    """Describe the checkpoints that an index names."""
    steps = list(index.checkpoints)
    return f"{plural(len(steps), 'checkpoint')}, the last of step {steps[-1]}" if steps else "no checkpoint yet"


def linked_run(folder: Path) -> str | None:
    """Return the identity of the stored run that a folder belongs to; None if it belongs to none."""
    try:
        return str(json.loads((folder / REMOTE).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):  # without an intact record it belongs to none
        return None


def require_same_run(folder: Path, url: str, run: str) -> None:
    """Check that a folder with checkpoints belongs to a stored run, not to another or to none."""
    if list_checkpoints(folder) and linked_run(folder) != run:
        raise UserError(
            f"--resume: {folder} is not the run that {url} holds. Move the folder away to continue the stored one, or "
            "give this run another name: name=..."
        )


def link(folder: Path, url: str, run: str) -> None:
    """Record which stored run a folder belongs to."""
    if linked_run(folder) != run:
        write_json(folder / REMOTE, {"url": url, "run": run})
