"""The section ``output``: folders and stores that a run writes to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from simpletune.data.storage.place import GIB, CachePlace
from simpletune.system.options import Option, Problem

LOCAL_RUNS = "runs"  # local folder of runs that are also kept in an object store
LOCAL_CACHE = ".cache"  # local cache folder if the cache is in an object store
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_STORE = re.compile(r"^(s3|gs|az)://[^/]+")
_READABLE = re.compile(r"^(s3|gs|az|https?)://[^/]+")


class Output(Option):
    """Folders to write to, relative to the current folder, and the prices of machines."""

    runs: str = "runs"
    """Folder for runs: configuration, metrics, samples, checkpoints and result of each. Or a URL, for example
    s3://BUCKET/runs, gs://BUCKET/runs or az://CONTAINER/runs: the run works in the folder runs, and uploads every
    checkpoint while it trains; --resume auto continues it on any machine."""
    profiles: str = "profiles"
    """Folder for TensorBoard: scalars, pictures and traces."""
    cache: str = ".cache"
    """Folder for cached latents and prompt embeddings, shared by all runs. Or a URL, for example s3://BUCKET/cache,
    gs://BUCKET/cache or az://CONTAINER/cache: they are stored there as shards, and what was read last is kept in the
    folder .cache, with everything else that is cached. https://... is only read."""
    cache_form: Literal["files", "shards"] | None = None
    """Form of cached latents, masks and prompt embeddings. files: one file for each; shards: up to 256 of them or
    64 MiB in a file, and an index, for large data sets. null: shards in an object store, otherwise files."""
    cache_local_gib: Annotated[float, Field(gt=0)] = 32.0
    """For a cache in an object store: disk space on this machine, in GiB, for what was read from there. The least
    recently used entries are removed first."""
    prices: str | None = None
    """JSON file of your prices, {CARD: {per_hour, as_of, source}}, for predictions and the report; they override those
    that ship with this package. null: use only the shipped ones."""
    report: bool = True
    """Write report.html and report.md into the run's folder at the end."""

    @property
    def folder(self) -> str:
        """Local folder of the runs."""
        return LOCAL_RUNS if _URL.match(self.runs) else self.runs

    @property
    def store(self) -> str | None:
        """URL of the object store that also keeps the runs, or None."""
        return self.runs.rstrip("/") if _URL.match(self.runs) else None

    @property
    def cache_folder(self) -> Path:
        """Local cache folder."""
        return Path(LOCAL_CACHE if _URL.match(self.cache) else self.cache)

    @property
    def place(self) -> CachePlace:
        """Location of cached latents, masks and prompt embeddings."""
        url = self.cache.rstrip("/") if _URL.match(self.cache) else None
        form = self.cache_form or ("files" if url is None else "shards")
        return CachePlace(self.cache_folder, form, url, int(self.cache_local_gib * GIB))

    def rules(self) -> Iterator[Problem]:
        """Refuse URLs of places that cannot be written to."""
        if self.store is not None and not _STORE.match(self.runs):
            yield Problem("output.runs", f"{self.runs} is not a store. Use s3://..., gs://..., az://... or a folder")
        if _URL.match(self.profiles):
            yield Problem("output.profiles", f"{self.profiles} must be a folder. Use a folder of this machine")
        if _URL.match(self.cache) and not _READABLE.match(self.cache):
            yield Problem(
                "output.cache",
                f"{self.cache} is not a store. Use s3://..., gs://..., az://..., https://... or a folder",
            )
        if _URL.match(self.cache) and self.cache_form == "files":
            yield Problem(
                "output.cache_form",
                f"files would take a request for each sample's header, and {self.cache} is an object store. Use "
                "shards, or a folder as output.cache",
            )
