"""Describe repositories and files on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Repository:
    """A repository on the hub at one revision.

    Args:
        name: owner/name.
        revision: branch, tag or commit; None: main.
        kind: ``model`` or ``dataset``.
    """

    name: str
    revision: str | None = None
    kind: str = "model"

    @property
    def cache(self) -> Path:
        """Folder of the repository in the hub's cache (HF_HUB_CACHE, HF_HOME)."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository as the hub lists it.

    Args:
        repository: repository of the file.
        commit: commit of the repository.
        path: path inside the repository.
        size: size in bytes.
        sha256: SHA-256 of files in large-file storage; None for small ones.
    """

    repository: Repository
    commit: str
    path: str
    size: int
    sha256: str | None

    @property
    def place(self) -> Path:
        """The file's path in the hub's cache, whether it exists or not."""
        return self.repository.cache / "snapshots" / self.commit / self.path

    @property
    def bytes_to_fetch(self) -> int:
        """The size, or 0 if a file with the same content is in the cache (from another commit)."""
        return 0 if (self.repository.cache / "blobs" / str(self.sha256)).exists() else self.size
