"""Where a run writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from simpletune.options import Option, Problem

LOCAL_RUNS = "runs"  # the folder of runs that are also kept in an object store
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_STORE = re.compile(r"^(s3|gs|az)://[^/]+")


class Output(Option):
    """Folders to write to, relative to the current folder, and what a run's price follows from."""

    runs: str = "runs"
    """Folder for runs: configuration, metrics, samples, checkpoints and result of each. Or a URL, for example
    s3://BUCKET/runs, gs://BUCKET/runs or az://CONTAINER/runs: the run works in the folder runs, and uploads every
    checkpoint while it trains; --resume auto continues it on any machine."""
    profiles: str = "profiles"
    """Folder for TensorBoard: scalars, pictures and traces."""
    cache: str = ".cache"
    """Folder for cached latents and prompt embeddings, shared by all runs."""
    prices: str | None = None
    """JSON file of your prices, {CARD: {per_hour, as_of, source}}, for predictions and the report; they come before
    those that ship with this package. null: only the latter."""
    report: bool = True
    """Write report.html and report.md into the run's folder at the end."""

    @property
    def folder(self) -> str:
        """The folder of runs on this machine."""
        return LOCAL_RUNS if _URL.match(self.runs) else self.runs

    @property
    def store(self) -> str | None:
        """The URL of the object store that also keeps the runs; None if there is none."""
        return self.runs.rstrip("/") if _URL.match(self.runs) else None

    def rules(self) -> Iterator[Problem]:
        """Refuse URLs of what cannot be written to."""
        if self.store is not None and not _STORE.match(self.runs):
            yield Problem("output.runs", f"{self.runs} is not a store. Use s3://..., gs://..., az://... or a folder")
        for name in ("profiles", "cache"):
            if _URL.match(getattr(self, name)):
                yield Problem(f"output.{name}", f"{getattr(self, name)} must be a folder. Use a folder of this machine")
