"""Fetching one file from the hub so that a cut loses nothing.

huggingface_hub (2.4) continues a cut download only within one process and throws the beginning away when it gives up.
Here the beginning stays in the hub's own cache as ``blobs/<sha256>.incomplete``, and the next try, of this process or
of another, asks for the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simpletune.models.hub_errors import clear_errors
from simpletune.options import UserError
from simpletune.system.checksums import sha256_of
from simpletune.system.console import progress, say

RETRIES = 5  # tries in a row that bring not a byte
PAUSE = 1.0  # seconds before the next try, times the tries that failed
MB = 10**6


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
        """Its folder in the hub's cache (HF_HUB_CACHE, HF_HOME)."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository as the hub lists it.

    Args:
        repository: that holds it.
        commit: of the repository.
        path: inside the repository.
        size: in bytes.
        sha256: of files in large-file storage; None for small ones.
    """

    repository: Repository
    commit: str
    path: str
    size: int
    sha256: str | None

    @property
    def place(self) -> Path:
        """Where the hub's cache shows it when it is here."""
        return self.repository.cache / "snapshots" / self.commit / self.path

    @property
    def blob(self) -> Path:
        """Where the hub's cache keeps a large file's content."""
        return self.repository.cache / "blobs" / str(self.sha256)

    @property
    def incomplete(self) -> Path:
        """Where the beginning of a large file waits for its rest."""
        return self.blob.with_suffix(".incomplete")

    @property
    def begun(self) -> int:
        """Bytes of a large file that an earlier try left."""
        return 0 if self.sha256 is None else min(max(_size(self.blob), _size(self.incomplete)), self.size)


def fetch_file(file: HubFile) -> None:
    """Fetch one file and let huggingface_hub enter it in its cache.

    Raises:
        UserError: it cannot be fetched.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    repository = file.repository
    with clear_errors(repository, file):
        if file.sha256 is not None:
            _fetch_blob(file)
        hf_hub_download(
            repository.name,
            file.path,
            repo_type=repository.kind,
            revision=file.commit,
            etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )


def _fetch_blob(file: HubFile) -> None:
    """Fetch a large file's content into the hub's cache, from where an earlier try was cut."""
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    lock = Path(constants.HF_HUB_CACHE) / ".locks" / file.repository.cache.name / f"{file.sha256}.lock"
    for folder in (file.blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if file.blob.exists():
            return
        _fetch_rest(file)
        if sha256_of(file.incomplete) != file.sha256:
            file.incomplete.unlink()
            raise UserError(
                f"{file.repository.name}: {file.path} arrived damaged (its sha256 differs) and was deleted. Start again"
            )
        os.replace(file.incomplete, file.blob)


def _fetch_rest(file: HubFile) -> None:
    """Ask for what is missing until all is there, or nothing more comes."""
    import httpx2
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    part, repository = file.incomplete, file.repository
    url = hf_hub_url(repository.name, file.path, repo_type=repository.kind, revision=file.commit)
    if _size(part) > file.size:
        part.unlink()
    start = _size(part)
    if start:
        say(f"fetch {file.path}: {start / MB:,.0f} of {file.size / MB:,.0f} MB are here, the rest follows")
    failures = 0
    with progress(f"fetch {file.path}", -(-(file.size - start) // MB), "MB") as advance:
        while (before := _size(part)) < file.size:
            try:
                for _ in _stream(url, part, before):
                    advance()
            except (httpx2.TransportError, HfHubHTTPError) as error:
                failures = 0 if _size(part) > before else failures + 1
                if failures > RETRIES or not _may_pass(error):
                    raise
                time.sleep(PAUSE * (failures + 1))


def _may_pass(error: Exception) -> bool:
    """Whether another try may help: after a cut, silence, or the hub's own trouble."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return not isinstance(error, httpx2.ProxyError)


def _stream(url: str, part: Path, start: int) -> Iterator[None]:
    """Append what the hub sends from byte ``start`` on; yields at every million bytes."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = {**build_hf_headers(), "Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
        hf_raise_for_status(answer)
        whole = answer.status_code == 200  # the server knows no ranges: it starts over
        with open(part, "wb" if whole else "ab") as out:
            written = 0
            for chunk in answer.iter_raw():
                out.write(chunk)
                yield from (None for _ in range((written + len(chunk)) // MB - written // MB))
                written += len(chunk)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
