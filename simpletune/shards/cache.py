"""A cache whose samples lie in shards, in a folder or in an object store.

Processes encode into single files first (``staged``), exactly as in the cache of single files: what one claims no other
encodes, and a kill loses at most the sample that was being encoded. Once there are enough of them they become a shard,
and are removed after it is stored; what a killed process has left is joined by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from simpletune.data.cache import ALONE, READ_WHOLE, Cache, Share, checksum
from simpletune.options import UserError
from simpletune.shards.catalogue import Catalogue
from simpletune.shards.local_part import LocalPart
from simpletune.shards.shard import SUFFIX, Row, parse_header, rows_of, tensors_of, write_shard
from simpletune.shards.shelf import Shelf
from simpletune.stores.store import StoreError
from simpletune.system.atomic import remove
from simpletune.system.console import say
from simpletune.system.failpoints import failpoint
from simpletune.system.locks import Ranges

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES, BYTES = 256, 64 * 2**20  # of a shard, at most; whichever is reached first
READS = 3  # of a sample whose checksum does not match, before it counts as damaged


class ShardedCache(Cache):
    """Content-addressed tensors in shards.

    Args:
        folder: of this machine, for what is not in a shard yet.
        shelf: where the shards lie.
        part: keeps what was read from a remote shelf; None: the shelf is a folder.
        label: the folder of this cache's samples there.
    """

    def __init__(self, folder: Path, shelf: Shelf, part: LocalPart | None = None, label: str = ""):
        super().__init__(folder / "staged")
        self.shelf, self.part, self.label = shelf, part, label
        self.catalogue = Catalogue(shelf, folder / "index")
        self.waited = 0.0
        """Seconds that ``load`` has waited for a remote shelf."""
        self._coming: dict[str, Lock] = {}
        self._lock = Lock()
        self._staged = (0, 0)  # files and bytes since the last look

    def _row(self, key: str) -> Row | None:
        return self.catalogue.index.find(self.file(key).stem)

    def __contains__(self, key: str) -> bool:
        with self._reached():
            if self.file(key).stem in self.catalogue.index or super().__contains__(key):
                return True
            if not self.catalogue.is_stale():
                return False
            self.catalogue.refresh()  # another process may have made a shard of it between the two looks
            return self.file(key).stem in self.catalogue.index or super().__contains__(key)

    def lacking(self, keys: Iterable[str], share: Share = ALONE) -> list[str]:
        """The keys that still have to be encoded. First joins what a killed process has left into shards.

        Verifies the checksums of a folder's shards if these keys take at most ``READ_WHOLE`` bytes. Of others only the
        presence of the shards is looked at; each sample is then verified when it is read.

        Raises:
            UserError: the store does not answer.
        """
        wanted = list(dict.fromkeys(keys))
        with self._reached():
            self.catalogue.refresh()
            staged = [key for key in wanted if super(ShardedCache, self).__contains__(key) and self._row(key) is None]
            super().lacking(staged, share)  # sets damaged ones aside
            self.join(everything=True, wait=False)
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
            except _Damaged as reason:
                say(f"cache   {reason}: noted in {self._set_row_aside(key, row)}; encoding it again")

    def claimed(self, keys: Iterable[str], share: Share = ALONE, together: int = 1) -> Iterator[list[str]]:
        """Claim keys to encode, as ``Cache.claimed`` does; joins what was encoded into shards meanwhile and at the end.

        Of a remote cache a process of several encodes its own share only: those of other machines cannot be claimed.

        Raises:
            UserError: the store does not answer. What was encoded is kept, and the next start stores it.
        """
        keys = list(keys)
        if self.shelf.remote and share.of > 1:
            keys = [key for key in keys if share.owner(key) == share.number]
            share = ALONE
        with self._reached():
            for group in super().claimed(keys, share, together):
                yield group
                self.join(everything=False, wait=False)
            self.join(everything=True, wait=True)

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a key, in a file of its own until it is joined into a shard.

        Raises:
            UserError: the disk is full; no partial file remains.
        """
        super().save(key, tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._staged = self._staged[0] + 1, self._staged[1] + size
        if self._staged[0] >= SAMPLES or self._staged[1] >= BYTES:
            with self._reached():
                self.join(everything=False, wait=False)

    def join(self, everything: bool, wait: bool) -> None:
        """Join encoded samples into shards, and store them.

        Args:
            everything: also fewer than a shard usually has.
            wait: for another process that is doing so; otherwise leave it to that one.

        Raises:
            StoreError: the store does not answer; the samples stay where they are.
        """
        if self.shelf.read_only or not self.folder.is_dir():
            return
        with Ranges(self.folder.parent / "joining.lock") as ranges, ranges.held(0, 0, wait) as alone:
            if not alone:
                return
            self._staged = (0, 0)
            for files, full in _shards_of(sorted(self.folder.glob(f"*{SUFFIX}"))):
                if full or everything:
                    self._store(files)
            self.catalogue.publish(everything)

    def _store(self, files: list[Path]) -> None:
        """Store encoded samples as a shard, then remove their files."""
        new = [file for file in files if file.stem not in self.catalogue.index]
        for file in set(files) - set(new):  # of a process that was killed before it removed them
            remove(file)
        try:
            for file in new:
                self._require_sound(file)
            if not new:
                return
            shard, file = self._written(new)
        except FileNotFoundError:
            return  # another process, which no lock excludes on this file system, has joined them
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            handle.seek(0)
            parsed = parse_header(handle.read(8 + length), shard)
        assert not isinstance(parsed, int)
        failpoint("shard.joined")
        self.shelf.put(shard, file)
        failpoint("shard.stored")
        self.catalogue.add(shard, rows_of(shard, *parsed))
        for each in new:
            remove(each)
        failpoint("shard.cleared")

    def _written(self, files: list[Path]) -> tuple[str, Path]:
        """Write a shard under a name that no damaged one has."""
        damaged, again = {shard for _, shard in self.shelf.damaged()}, 0
        while (written := write_shard(files, self.folder.parent / "joined", again))[0] in damaged:
            again += 1
        return written

    def _require_sound(self, file: Path) -> None:
        """Verify the checksum of an encoded sample, once per process.

        Raises:
            UserError: it is damaged; it has been renamed.
        """
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            key = str((handle.metadata() or {}).get("key"))
        if key not in self._sound:
            super().load(key)

    def load(self, key: str) -> dict[str, Tensor]:
        """Load a key's tensors. Verifies their checksum when they come from the store, and once per process.

        Raises:
            FileNotFoundError: the key is in no shard.
            UserError: the sample is damaged and was set aside, or the store does not answer.
        """
        with self._reached():
            row = self._row(key)
        if row is None:
            try:
                return super().load(key)
            except FileNotFoundError:
                with self._reached():
                    self.catalogue.refresh()  # another process may have made a shard of it
                row = self._row(key)
                if row is None:
                    raise
        try:
            with self._reached():
                return self._sample(key, row)
        except _Damaged as reason:
            with self._reached():
                place = self._set_row_aside(key, row)
            raise UserError(
                f"{reason}: noted in {place}. Restart, or continue with --resume latest, to encode it again"
            ) from None

    def size_of(self, key: str) -> int:
        """The bytes of a sample in a shard; 0 if it is in none."""
        row = self._row(key)
        return 0 if row is None else row.size

    def bring(self, key: str) -> None:
        """Fetch a sample from a remote shelf into the local part, unless it is there or in no shard.

        Raises:
            UserError: the store does not answer, or the sample is damaged.
        """
        row = self._row(key)
        if self.part is None or row is None or self._place(row) in self.part:
            return
        with self._reached(), self._alone(row):
            if self._place(row) not in self.part:
                self._fetched(key, row, self.part)

    def _sample(self, key: str, row: Row) -> dict[str, Tensor]:
        """Read a sample.

        Raises:
            _Damaged: its checksum does not match, each time that it was read.
            StoreError: the store does not answer.
        """
        if self.part is None:
            try:
                content = self.shelf.read(row.shard, row.start, row.start + row.size)
            except StoreError as error:  # of a folder: the shard is gone or cut
                raise _Damaged(str(error)) from None
            return self._checked(key, row, content)
        content = self.part.get(self._place(row))
        if content is not None:
            try:
                return self._checked(key, row, content)
            except _Damaged:  # on this machine; the store may have it whole
                self.part.remove(self._place(row))
        began = time.perf_counter()
        try:
            with self._alone(row):
                content = self.part.get(self._place(row))
                return self._fetched(key, row, self.part) if content is None else self._checked(key, row, content)
        finally:
            self.waited += time.perf_counter() - began

    def _fetched(self, key: str, row: Row, part: LocalPart) -> dict[str, Tensor]:
        """Fetch a sample and keep it in the local part.

        Raises:
            _Damaged: its checksum does not match, each time.
            StoreError: the store does not answer.
        """
        for left in reversed(range(READS)):
            content = self.shelf.read(row.shard, row.start, row.start + row.size)
            self._sound.discard(key)
            try:
                tensors = self._checked(key, row, content)
            except _Damaged:
                if not left:
                    raise
                continue
            part.put(self._place(row), content)
            return tensors
        raise AssertionError("unreachable")

    def _checked(self, key: str, row: Row, content: bytearray) -> dict[str, Tensor]:
        """The tensors of a sample's bytes, whose checksum is verified once per process.

        Raises:
            _Damaged: it does not match.
        """
        try:
            tensors = tensors_of(content, row.layout)
        except (ValueError, RuntimeError) as error:
            raise _Damaged(f"{key[:80]!r} in shard {row.shard} of {self.shelf} is damaged ({error})") from None
        if key not in self._sound:
            if int(checksum(tensors), 16) != row.crc32:
                raise _Damaged(
                    f"{key[:80]!r} in shard {row.shard} of {self.shelf} is damaged (its checksum does not match)"
                )
            self._sound.add(key)
        return tensors

    def _place(self, row: Row) -> str:
        """The name of a sample in the local part, which differs for every shard that has held it."""
        return f"{self.label}/{row.name}.{row.shard[:8]}"

    def _alone(self, row: Row) -> Lock:
        """A lock that one thread holds while it fetches this sample."""
        with self._lock:
            if len(self._coming) > 4096:
                self._coming = {name: lock for name, lock in self._coming.items() if lock.locked()}
            return self._coming.setdefault(row.name, Lock())

    def quarantine(self, key: str) -> str:
        """Set a sample aside, so that it is encoded again; return where that is noted."""
        row = self._row(key)
        if row is None:
            return super().quarantine(key)
        return self._set_row_aside(key, row)

    def _set_row_aside(self, key: str, row: Row) -> str:
        self._sound.discard(key)
        place = self.shelf.set_aside(row.name, row.shard)
        self.catalogue.forget(row.name, row.shard)
        if self.part is not None:
            self.part.remove(self._place(row))
        return place

    def _reached(self) -> _Reached:
        return _Reached(self.shelf)


class _Damaged(Exception):
    """Report that a sample's bytes are not those that were stored."""


class _Reached:
    """Turn a store's failure into a message for the user, within this context."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StoreError):
            raise UserError(
                f"output.cache: {error}. Check the URL, the credentials and the network, then continue with --resume "
                "latest, or start again; what was encoded is kept"
            ) from None


def _shards_of(files: list[Path]) -> Iterator[tuple[list[Path], bool]]:
    """Divide encoded samples into shards; the last one may not be full."""
    portion, size = list[Path](), 0
    for file in files:
        try:
            own = file.stat().st_size
        except FileNotFoundError:
            continue
        if portion and size + own > BYTES:
            yield portion, True
            portion, size = [], 0
        portion.append(file)
        size += own
        if len(portion) >= SAMPLES:
            yield portion, True
            portion, size = [], 0
    if portion:
        yield portion, False
