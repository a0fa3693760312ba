"""Read the files of a data set's repository on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from simpletune.system.printable import describe_exception
from simpletune.system.redact import redact
from simpletune.system.stores.store import StoreError, StoreReader, require_length

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

HUB = "hf://"


class HubStore(StoreReader):
    """A repository, or a folder in one: ``hf://datasets/OWNER/NAME``, optionally followed by a folder."""

    def __init__(self, url: str):
        from huggingface_hub import HfFileSystem

        self.url, self._root = url, url.removeprefix(HUB)
        self._hub: HfFileSystem = HfFileSystem()

    def versions(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """List the files, with the hashes under which the repository stores them."""
        with _errors(self.url):
            found = cast(dict[str, dict[str, str]], self._hub.find(f"{self._root}/{prefix}".rstrip("/"), detail=True))
        return {
            name.removeprefix(f"{self._root}/"): (int(about["size"]), str(about.get("blob_id") or ""))
            for name, about in found.items()
        }

    def read_range(self, key: str, start: int, end: int) -> bytearray:
        """Read a file's bytes; the hub's client retries failures."""
        with _errors(f"{self.url}: {key}"):
            content = bytearray(self._hub.cat_file(f"{self._root}/{key}", start=start, end=end))
        return require_length(content, end - start, f"{self.url}: {key}")


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Turn every failure of the hub into a StoreError that names what was read."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise StoreError(redact(f"{what} cannot be read ({describe_exception(error)[:300]})")) from None
