"""Where a run's cache is stored, and in what form. Imports no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simpletune.system.processes import local_process_count

if TYPE_CHECKING:
    from simpletune.data.storage.cache import Cache

GIB = 2**30
REMOTE, PART = "remote", "part"  # folders: for caches in object stores, and in each of them for what was read


@dataclass(frozen=True)
class CachePlace:
    """The place of a cache.

    Args:
        folder: this machine's folder.
        form: single files, or shards.
        url: the URL of the object store or web server that has the shards; None: they are in the folder.
        limit: the largest size, in bytes, of what was read from there and is kept in the folder.
    """

    folder: Path
    form: Literal["files", "shards"] = "files"
    url: str | None = None
    limit: int = 32 * GIB

    @property
    def local(self) -> Path:
        """The folder for what is not yet in the object store, and for what was read from it."""
        if self.url is None:
            return self.folder
        return self.folder / REMOTE / hashlib.sha256(self.url.encode()).hexdigest()[:16]


def open_cache(place: CachePlace | Path, kind: str, name: str = "") -> Cache:
    """Open a part of a cache.

    Args:
        place: the place of the whole cache; a path: a folder of single files.
        kind: ``latents`` or ``prompts``; in earlier versions ``text``.
        name: identifies the encoder.

    Raises:
        UserError: the URL cannot be opened.
    """
    from simpletune.data.storage.cache import FileCache

    place = CachePlace(place) if isinstance(place, Path) else place
    folder = place.local / kind / name
    if place.form == "files":
        return FileCache(folder, encoder=name)
    from simpletune.data.storage.copies import LocalCopies
    from simpletune.data.storage.shard_cache import ShardCache
    from simpletune.data.storage.shards import SHARDS, ShardStore

    if place.url is None:
        from simpletune.system.stores.folder_store import FolderStore

        return ShardCache(folder, ShardStore(FolderStore(folder), folder / SHARDS))
    from simpletune.system.stores.object_store import ObjectStore

    store = ObjectStore("/".join(filter(None, (place.url, kind, name))), "output.cache")
    copies = LocalCopies(place.local / PART, place.limit, local_process_count())
    return ShardCache(folder, ShardStore(store, folder / "stored"), copies, f"{kind}/{name}")
