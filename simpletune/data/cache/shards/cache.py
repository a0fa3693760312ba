"""A cache whose samples are stored in shards, in a folder or in an object store.

Processes first encode into single files (``staged``), exactly as in the cache of single files: no other process encodes
what one has claimed, and a kill loses at most the sample that was being encoded. Once there are enough files, they are
joined into a shard and removed after it is stored; the next process joins what a killed one has left.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from simpletune.data.cache.cache import ALONE, READ_WHOLE, Cache, KeyRange, checksum
from simpletune.data.cache.shards.errors import DamagedSample, StoreErrorsExplained
from simpletune.data.cache.shards.local_cache import LocalCache
from simpletune.data.cache.shards.shard import SampleLocation, sample_tensors
from simpletune.data.cache.shards.shard_index import ShardIndex
from simpletune.data.cache.shards.shard_store import ShardStore
from simpletune.data.cache.shards.shard_writer import ShardWriter
from simpletune.system.console import say
from simpletune.system.options import UserError
from simpletune.system.stores.store import StoreError

if TYPE_CHECKING:
    from torch import Tensor

READS = 3  # reads of a sample whose checksum does not match, before it counts as damaged


class ShardedCache(Cache):
    """Content-addressed tensors in shards.

    Args:
        folder: this machine's folder, for what is not in a shard yet.
        shelf: where the shards are stored.
        part: stores what was read from a remote shelf; None: the shelf is a folder.
        label: the folder of this cache's samples there.
    """

    def __init__(self, folder: Path, shelf: ShardStore, part: LocalCache | None = None, label: str = ""):
        super().__init__(folder / "staged")
        self.shelf, self.part, self.label = shelf, part, label
        self.catalogue = ShardIndex(shelf, folder / "index")
        self.joiner = ShardWriter(self, shelf, self.catalogue)
        self.waited = 0.0
        """Seconds that ``load`` has waited for a remote shelf."""
        self._coming: dict[str, Lock] = {}
        self._reading = Lock()

    def _row(self, key: str) -> SampleLocation | None:
        return self.catalogue.index.find(self.file(key).stem)

    def __contains__(self, key: str) -> bool:
        with StoreErrorsExplained(self.shelf):
            if self.file(key).stem in self.catalogue.index or super().__contains__(key):
                return True
            if not self.catalogue.is_stale():
                return False
            self.catalogue.refresh()  # another process may have made a shard of it between the two looks
            return self.file(key).stem in self.catalogue.index or super().__contains__(key)

    def lacking(self, keys: Iterable[str], share: KeyRange = ALONE) -> list[str]:
        """The keys that still have to be encoded. First joins what a killed process has left into shards. Verifies the
        checksums of a folder's shards if these keys take at most ``READ_WHOLE`` bytes. Otherwise checks only that the
        shards exist, and verifies each sample when it is read.

        Raises:
            UserError: the store does not answer.
        """
        wanted = list(dict.fromkeys(keys))
        with StoreErrorsExplained(self.shelf):
            self.catalogue.refresh()
            staged = [key for key in wanted if super(ShardedCache, self).__contains__(key) and self._row(key) is None]
            super().lacking(staged, share)  # sets damaged ones aside
            self.joiner.join(everything=True, wait=False)
            if share.number == 0:
                self.catalogue.publish(everything=True)
            self._verify([key for key in wanted if share.owner(key) == share.number])
            return [key for key in wanted if key not in self]

    def _verify(self, keys: list[str]) -> None:
        """Read samples of a folder's shards, if they are few, and set damaged ones aside."""
        rows = {key: row for key in keys if key not in self._sound and (row := self._row(key)) is not None}
        if self.shelf.remote or sum(row.size for row in rows.values()) > READ_WHOLE:
            return
        for key, row in rows.items():
            try:
                self._sample(key, row)
            except DamagedSample as reason:
                say(f"cache   {reason}: noted in {self._set_row_aside(key, row)}; encoding it again")

    def claimed(self, keys: Iterable[str], share: KeyRange = ALONE, together: int = 1) -> Iterator[list[str]]:
        """Claim keys to encode, as ``Cache.claimed`` does; joins what was encoded into shards along the way and at the
        end. With a remote cache and several processes, each process encodes only its own share: it cannot claim keys of
        other machines.

        Raises:
            UserError: the store does not answer. What was encoded is kept, and the next start stores it.
        """
        keys = list(keys)
        if self.shelf.remote and share.of > 1:
            keys = [key for key in keys if share.owner(key) == share.number]
            share = ALONE
        with StoreErrorsExplained(self.shelf):
            for group in super().claimed(keys, share, together):
                yield group
                self.joiner.join(everything=False, wait=False)
            self.joiner.join(everything=True, wait=True)

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a key, in a separate file until it is joined into a shard.

        Raises:
            UserError: the disk is full; no partial file remains.
        """
        super().save(key, tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self.joiner.has_enough(size):
            with StoreErrorsExplained(self.shelf):
                self.joiner.join(everything=False, wait=False)

    def load(self, key: str) -> dict[str, Tensor]:
        """Load a key's tensors. Verifies their checksum when they come from the store, and once per process.

        Raises:
            FileNotFoundError: the key is in no shard.
            UserError: the sample is damaged and was set aside, or the store does not answer.
        """
        with StoreErrorsExplained(self.shelf):
            row = self._row(key)
        if row is None:
            try:
                return super().load(key)
            except FileNotFoundError:
                with StoreErrorsExplained(self.shelf):
                    self.catalogue.refresh()  # another process may have made a shard of it
                row = self._row(key)
                if row is None:
                    raise
        try:
            with StoreErrorsExplained(self.shelf):
                return self._sample(key, row)
        except DamagedSample as reason:
            with StoreErrorsExplained(self.shelf):
                place = self._set_row_aside(key, row)
            raise UserError(
                f"{reason}: noted in {place}. Restart, or continue with --resume latest, to encode it again"
            ) from None

    def size_of(self, key: str) -> int:
        """The size in bytes of a sample in a shard; 0 if it is in none."""
        row = self._row(key)
        return 0 if row is None else row.size

    def bring(self, key: str) -> None:
        """Fetch a sample from a remote shelf into the local part, unless it is already there or is in no shard.

        Raises:
            UserError: the store does not answer, or the sample is damaged.
        """
        row = self._row(key)
        if self.part is None or row is None or self._place(row) in self.part:
            return
        with StoreErrorsExplained(self.shelf), self._alone(row):
            if self._place(row) not in self.part:
                self._fetched(key, row, self.part)

    def _sample(self, key: str, row: SampleLocation) -> dict[str, Tensor]:
        """Read a sample.

        Raises:
            Damaged: its checksum did not match in any attempt.
            StoreError: the store does not answer.
        """
        if self.part is None:
            try:
                read = self.shelf.read(row.shard, row.start, row.start + row.size)
            except StoreError as error:  # in a folder: the shard is gone or truncated
                raise DamagedSample(str(error)) from None
            return self._checked(key, row, read)
        content = self.part.get(self._place(row))
        if content is not None:
            try:
                return self._checked(key, row, content)
            except DamagedSample:  # damaged on this machine; the store may have an intact copy
                self.part.remove(self._place(row))
        began = time.perf_counter()
        try:
            with self._alone(row):
                content = self.part.get(self._place(row))
                return self._fetched(key, row, self.part) if content is None else self._checked(key, row, content)
        finally:
            self.waited += time.perf_counter() - began

    def _fetched(self, key: str, row: SampleLocation, part: LocalCache) -> dict[str, Tensor]:
        """Fetch a sample and keep it in the local part.

        Raises:
            Damaged: its checksum did not match in any attempt.
            StoreError: the store does not answer.
        """
        for left in reversed(range(READS)):
            content = self.shelf.read(row.shard, row.start, row.start + row.size)
            self._sound.discard(key)
            try:
                tensors = self._checked(key, row, content)
            except DamagedSample:
                if not left:
                    raise
                continue
            part.put(self._place(row), content)
            return tensors
        raise AssertionError("unreachable")

    def _checked(self, key: str, row: SampleLocation, content: bytearray) -> dict[str, Tensor]:
        """The tensors in a sample's bytes; verifies the checksum once per process.

        Raises:
            Damaged: the checksum does not match.
        """
        try:
            tensors = sample_tensors(content, row.layout)
        except (ValueError, RuntimeError) as error:
            raise DamagedSample(f"{key[:80]!r} in shard {row.shard} of {self.shelf} is damaged ({error})") from None
        if key not in self._sound:
            if int(checksum(tensors), 16) != row.crc32:
                raise DamagedSample(
                    f"{key[:80]!r} in shard {row.shard} of {self.shelf} is damaged (its checksum does not match)"
                )
            self._sound.add(key)
        return tensors

    def _place(self, row: SampleLocation) -> str:
        """The name of a sample in the local part; it includes the shard."""
        return f"{self.label}/{row.name}.{zlib.crc32(row.shard.encode()):08x}"

    def _alone(self, row: SampleLocation) -> Lock:
        """A lock that one thread holds while it fetches this sample."""
        with self._reading:
            if len(self._coming) > 4096:
                self._coming = {name: lock for name, lock in self._coming.items() if lock.locked()}
            return self._coming.setdefault(row.name, Lock())

    def quarantine(self, key: str) -> str:
        """Set a sample aside, so that it is encoded again; return where this is recorded."""
        row = self._row(key)
        if row is None:
            return super().quarantine(key)
        return self._set_row_aside(key, row)

    def _set_row_aside(self, key: str, row: SampleLocation) -> str:
        self._sound.discard(key)
        place = self.shelf.set_aside(row.name, row.shard)
        self.catalogue.forget(row.name, row.shard)
        if self.part is not None:
            self.part.remove(self._place(row))
        return place
