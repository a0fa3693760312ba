"""Where a run's cache is stored, and in what form. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from simpletune.data.cache.cache import Cache

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
        kind: ``latents``, ``text`` or ``masks``.
        name: identifies the encoder.

    Raises:
        UserError: the URL cannot be opened.
    """
    from simpletune.data.cache.cache import Cache

    place = CachePlace(place) if isinstance(place, Path) else place
    folder = place.local / kind / name
    if place.form == "files":
        return Cache(folder)
    from simpletune.data.cache.shards.cache import ShardedCache
    from simpletune.data.cache.shards.local_cache import LocalCache
    from simpletune.data.cache.shards.shard_store import FolderShardStore, RemoteShardStore

    if place.url is None:
        return ShardedCache(folder, FolderShardStore(folder))
    from simpletune.system.stores.store import Store

    store = Store("/".join(filter(None, (place.url, kind, name))), "output.cache")
    part = LocalCache(place.local / PART, place.limit, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return ShardedCache(folder, RemoteShardStore(store, folder / "stored"), part, f"{kind}/{name}")
