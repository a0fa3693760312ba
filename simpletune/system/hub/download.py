"""Download one file with huggingface_hub."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from simpletune.system.checksums import sha256_of
from simpletune.system.console import progress, say
from simpletune.system.hub.errors import class_names, explain_hub_errors
from simpletune.system.hub.repository import HubFile
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

TRIES = 3  # attempts per file, for failures that huggingface_hub does not retry
PAUSE = 2.0  # seconds before the second attempt; twice that before the third
MB = 10**6
RETRIED = {
    "ConnectError",
    "TimeoutException",
    "ProxyError",
}  # huggingface_hub already retried these, or a retry cannot help


def fetch_file(file: HubFile) -> None:
    """Download one file into huggingface_hub's cache, and check the SHA-256 of a large one.

    Raises:
        UserError: the download failed, or the file arrived damaged.
    """
    large = file.sha256 is not None
    with explain_hub_errors(file.repository, file):
        shown = progress(f"fetch {file.path}", -(-file.size // MB), "MB") if large else nullcontext(lambda: None)
        with shown as count:
            _download(file, _progress_bar(count))
        if large and sha256_of(file.place) != file.sha256:
            for damaged in (file.place.resolve(), file.place):
                damaged.unlink(missing_ok=True)
            raise UserError(
                f"{file.repository.name}: {file.path} arrived damaged (wrong sha256) and was deleted. Start again"
            )


def _download(file: HubFile, bar: type[tqdm]) -> None:
    """Call huggingface_hub, up to ``TRIES`` times for failures that it does not retry itself."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HTTPError

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_without_addresses)
    for attempt in range(1, TRIES + 1):
        try:
            hf_hub_download(
                file.repository.name,
                file.path,
                repo_type=file.repository.kind,
                revision=file.commit,
                etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
                tqdm_class=bar,
            )
            return
        except (HTTPError, OSError) as error:
            if attempt == TRIES or not _worth_a_retry(error):
                raise
            say(f"fetch {file.path}: {type(error).__name__}, attempt {attempt + 1} of {TRIES}")
            time.sleep(PAUSE * attempt)


def _worth_a_retry(error: Exception) -> bool:
    """Whether a failure may be temporary but huggingface_hub (2.4) gave up without a retry.

    It resumes an interrupted GET and retries a HEAD; it does neither after a 5xx response to a GET, a reset connection,
    an interrupted HEAD or a file of the wrong size (an OSError without errno).
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    if isinstance(error, HTTPError):
        return not class_names(error) & RETRIED
    return type(error) is OSError and error.errno is None


def _without_addresses(record: logging.LogRecord) -> bool:
    """Remove URLs from huggingface_hub's warnings: a signed URL gives every reader of the log access to the file."""
    record.msg, record.args = re.sub(r"https?://\S*[^\s:]", "the hub", record.getMessage()), ()
    return True


def _progress_bar(count: Callable[[], None]) -> type[tqdm]:
    """Create a progress bar for huggingface_hub that draws nothing and calls ``count`` once per megabyte.

    hf_xet has two bars, for the network and the disk; the one that is ahead counts.
    """
    from huggingface_hub.utils import tqdm

    counted = 0

    class Counter(tqdm):
        def __init__(self, **_: object):
            super().__init__(disable=True)
            self.bytes = 0

        def update(self, n: float | None = 1) -> None:
            nonlocal counted
            self.bytes += int(n or 0)  # negative when a download starts over
            while counted < self.bytes // MB:
                counted += 1
                count()

    return Counter
