"""Read and write a folder of an object store (S3, Google Cloud Storage, Azure) with obstore.

Credentials, region and endpoint come from the usual environment variables (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, ...) or from the machine itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.system.atomic import atomic_file
from simpletune.system.extras import install_extra
from simpletune.system.options import UserError
from simpletune.system.printable import describe_exception
from simpletune.system.redact import redact
from simpletune.system.stores.store import (
    CHANGED,
    ObjectChanged,
    Store,
    StoreError,
    require_length,
    send_with_retries,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client
    from obstore.store import RetryConfig

PART = 16 * 2**20  # bytes of a part of a large file
PARTS_AT_ONCE = 4
RETRIES: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}  # within one request
ANSWER, CONNECT = timedelta(seconds=120), timedelta(seconds=10)  # timeouts of one request


class ObjectStore(Store):
    """A folder of an object store.

    Args:
        url: the folder's URL, for example ``s3://bucket/runs/NAME``. ``http(s)://`` can only be read, by key.
        field: the configuration field that names it, for messages.

    Raises:
        UserError: obstore is not installed, or the URL or its settings are invalid.
    """

    def __init__(self, url: str, field: str = "output.runs"):
        self.url = url.rstrip("/")
        self.read_only = self.url.startswith(("http://", "https://"))
        self._store = _open(self.url, field)

    def versions(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        import obstore

        with self._errors(f"listing {prefix or 'the folder'}"):
            chunks = obstore.list(self._store, prefix or None)
            return {meta["path"]: (meta["size"], meta["e_tag"] or "") for chunk in chunks for meta in chunk}

    def upload(self, file: Path | bytes, key: str) -> None:
        """Store a file, or its content, under a key atomically; the file stays."""
        import obstore

        with self._errors(f"uploading {key}"):
            size = len(file) if isinstance(file, bytes) else file.stat().st_size
            obstore.put(self._store, key, file, chunk_size=PART, max_concurrency=PARTS_AT_ONCE)
            stored = obstore.head(self._store, key)["size"]
        if stored != size:
            raise StoreError(f"{key} has {stored} bytes in {self.url} instead of {size}")

    def fetch(self, key: str, file: Path, size: int) -> None:
        """Write an object of a known size to a file atomically."""
        import obstore

        file.parent.mkdir(parents=True, exist_ok=True)
        with self._errors(f"fetching {key}"), atomic_file(file) as part:
            with open(part, "wb") as handle:
                for chunk in obstore.get(self._store, key).stream(min_chunk_size=2**20):
                    handle.write(chunk)
                written = handle.tell()
            if written != size:
                raise StoreError(f"{key} gave {written} bytes instead of {size}")

    def read(self, key: str) -> tuple[bytes, str | None] | None:
        import obstore

        with self._errors(f"reading {key}"):
            try:
                answer = obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            return bytes(answer.bytes()), answer.meta["e_tag"]

    def read_range(self, key: str, start: int, end: int) -> bytearray:
        import obstore

        if end <= start:
            return bytearray()

        def read() -> bytearray:
            with self._errors(f"reading bytes {start:,} to {end:,} of {key}"):
                content = bytearray(obstore.get_range(self._store, key, start=start, end=end))
            return require_length(content, end - start, f"{key} in {self.url}")

        return send_with_retries(read)

    def replace(self, key: str, content: bytes, known: str | None) -> str | None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._errors(f"writing {key}"):
            try:
                mode = "create" if known is None else {"e_tag": known}
                return obstore.put(self._store, key, content, mode=mode)["e_tag"]  # type: ignore[arg-type]
            except (AlreadyExistsError, PreconditionError):
                raise ObjectChanged(CHANGED) from None

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; ignore those that do not exist."""
        import obstore

        with self._errors("removing old files"):
            for key in keys:
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn every failure of the store into a StoreError that names the operation."""
        from obstore.exceptions import BaseError

        try:
            yield
        except StoreError:
            raise
        except (BaseError, OSError, ValueError, NotImplementedError) as error:
            raise StoreError(redact(f"{what} in {self.url} failed ({_short_reason(error)})")) from None


def _short_reason(error: Exception) -> str:
    """Shorten a store's error to its first sentence; obstore appends its own state over many lines."""
    return describe_exception(error).partition("Debug source")[0].strip()[:300]


def _open(url: str, field: str) -> Client:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise UserError(
            f"{field}: {url} needs the package obstore, which is not installed. Run: {install_extra('remote')}",
            code=3,
        ) from None
    places = [url, *(os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"))]
    plain = any(place.startswith("http://") for place in places)
    # S3 compares what arrives with a checksum in the request, of each part of a large file, too.
    checked = url.startswith(("s3://", "s3a://")) and "AWS_CHECKSUM_ALGORITHM" not in os.environ
    try:
        return from_url(
            url,
            client_options={"timeout": ANSWER, "connect_timeout": CONNECT, "allow_http": plain},
            retry_config=RETRIES,
            config={"checksum_algorithm": "SHA256"} if checked else None,
        )
    except (BaseError, ValueError) as error:
        reason = redact(_short_reason(error))
        raise UserError(f"{field}: {url} cannot be opened ({reason}). Check the URL and the credentials") from None
