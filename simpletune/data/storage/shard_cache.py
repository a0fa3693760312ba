"""A cache whose samples are stored in shards, in a folder or in an object store.

Processes first encode into single files (``staged``), exactly as in a ``FileCache``: no other process encodes what one
has claimed, and a kill loses at most the sample that was being encoded. Once there are enough files, they are joined
into a shard and removed after it is stored; the next process joins what a killed one has left.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from simpletune.data.storage.cache import (
    READ_WHOLE,
    Cache,
    DamagedSample,
    FileCache,
    checksum,
    name_of,
    sample_tensors,
    span,
)
from simpletune.data.storage.claims import ALONE, KeyRange
from simpletune.data.storage.copies import LocalCopies
from simpletune.data.storage.shard_index import ShardIndex
from simpletune.data.storage.shards import (
    SUFFIX,
    SampleLocation,
    ShardStore,
    parse_header,
    sample_locations,
    write_shard,
)
from simpletune.system.atomic import remove
from simpletune.system.console import say
from simpletune.system.locks import Ranges
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header
from simpletune.system.stores.store import StoreError

if TYPE_CHECKING:
    from torch import Tensor

READS = 3  # reads of a sample whose checksum does not match, before it counts as damaged
SAMPLES, BYTES = 256, 64 * 2**20  # limits of a shard; the first one reached closes it
THREADS = 16  # requests at once for coming steps
AHEAD = 2**30  # bytes of coming steps, at most; and a quarter of what is kept locally
STEPS = 256  # coming steps, at most


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn a store's failure into a message for the user."""
    try:
        yield
    except StoreError as error:
        raise UserError(
            f"output.cache: {error}. Check the URL, the credentials and the network, then continue with --resume "
            "latest, or start again; what was encoded is kept"
        ) from None


class ShardCache(Cache):
    """Tensors by key in shards.

    Args:
        folder: this machine's folder, for what is not in a shard yet.
        shards: where the shards are stored.
        copies: keeps what was read from a remote store; None: the shards are in a folder.
        label: the folder of this cache's samples in ``copies``.
    """

    def __init__(self, folder: Path, shards: ShardStore, copies: LocalCopies | None = None, label: str = ""):
        self.staged = FileCache(folder / "staged", encoder=folder.name)
        self.folder = self.staged.folder
        self.shards, self.copies, self.label = shards, copies, label
        self.remote, self.local_limit = copies is not None, 0 if copies is None else copies.limit
        self.index = ShardIndex(shards)
        self._writer = ShardWriter(self.staged, self.index)
        self._fetching: dict[str, Lock] = {}
        self._lock = Lock()

    def location(self, key: str) -> SampleLocation | None:
        """Return where a sample is; None if it is in no shard."""
        return self.index.samples.find(name_of(key))

    def __contains__(self, key: str) -> bool:
        with _store_errors():
            if name_of(key) in self.index.samples or key in self.staged:
                return True
            if not self.index.is_stale():
                return False
            self.index.refresh()  # another process may have made a shard of it between the two looks
            return name_of(key) in self.index.samples or key in self.staged

    def lacking(self, keys: Iterable[str], share: KeyRange = ALONE) -> list[str]:
        wanted = list(dict.fromkeys(keys))
        with _store_errors():
            self.index.refresh()
            # what a killed process has left, whoever needs it
            self.staged.set_damaged_aside(lambda file: file.stem not in self.index.samples)
            self._writer.join(everything=True, wait=False)
            if share.number == 0:
                self.index.publish(everything=True)
            self._verify([key for key in wanted if share.owner(key) == share.number])
            return [key for key in wanted if key not in self]

    def _verify(self, keys: list[str]) -> None:
        """Read samples of a folder's shards, if they are few, and set damaged ones aside."""
        found = {k: at for k in keys if k not in self.staged.sound and (at := self.location(k)) is not None}
        if self.remote or sum(at.size for at in found.values()) > READ_WHOLE:
            return
        for key, at in found.items():
            try:
                self._read(key, at)
            except DamagedSample as reason:
                say(f"cache   {reason}: {self._set_aside(key)}; encoding it again")

    def claim(self, keys: Iterable[str], share: KeyRange = ALONE, together: int = 1) -> Iterator[list[str]]:
        """Claim keys to encode; joins what was encoded into shards along the way and at the end."""
        keys = list(keys)
        if self.remote and share.of > 1:  # it cannot claim keys of other machines
            keys = [key for key in keys if share.owner(key) == share.number]
            share = ALONE
        with _store_errors():
            for group in self.staged.claim(keys, share, together, self.__contains__):
                yield group
                self._writer.join(everything=False, wait=False)
            self._writer.join(everything=True, wait=True)

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self.staged.save(key, tensors)
        with _store_errors():
            self._writer.note(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))

    def _load(self, key: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
        with _store_errors():
            at = self.location(key)
            if at is None:
                try:
                    return self.staged.load(key, only)
                except FileNotFoundError:
                    self.index.refresh()  # another process may have made a shard of it
                    at = self.location(key)
                    if at is None:
                        raise
            return self._read(key, at, only)

    def size_of(self, key: str) -> int:
        at = self.location(key) if self.remote else None
        return 0 if at is None else at.size

    def fetch(self, key: str) -> None:
        at = self.location(key)
        if self.copies is None or at is None or self._copy(at) in self.copies:
            return
        with _store_errors(), self._sample_lock(at):
            if self._copy(at) not in self.copies:
                self._fetch_verified(key, at, self.copies)

    def _read(self, key: str, at: SampleLocation, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Read a sample, or only some of its tensors.

        Raises:
            DamagedSample: its checksum did not match in any attempt.
            StoreError: the store does not answer.
        """
        if self.copies is None:
            layout = at.layout
            if only is not None and key in self.staged.sound:
                layout = tuple(place for place in layout if place[0] in only)
            first, end = (0, at.size) if layout == at.layout else span(layout)
            try:
                content = self.shards.read(at.shard, at.start + first, at.start + end)
            except StoreError as error:  # in a folder: the shard is gone or truncated
                raise DamagedSample(str(error)) from None
            tensors = (
                self._verify_sample(key, at, content)
                if layout == at.layout
                else sample_tensors(content, layout, -first)
            )
        else:
            tensors = self._read_remote(key, at, self.copies)
        return tensors if only is None else {name: tensors[name] for name in only if name in tensors}

    def _read_remote(self, key: str, at: SampleLocation, copies: LocalCopies) -> dict[str, Tensor]:
        """Read a sample from its local copy, or fetch it."""
        copy = copies.get(self._copy(at))
        if copy is not None:
            try:
                return self._verify_sample(key, at, copy)
            except DamagedSample:  # damaged on this machine; the store may have an intact copy
                copies.remove(self._copy(at))
        began = time.perf_counter()
        try:
            with self._sample_lock(at):
                copy = copies.get(self._copy(at))
                return self._fetch_verified(key, at, copies) if copy is None else self._verify_sample(key, at, copy)
        finally:
            self.waited += time.perf_counter() - began

    def _fetch_verified(self, key: str, at: SampleLocation, copies: LocalCopies) -> dict[str, Tensor]:
        """Fetch a sample and keep a copy."""
        for left in reversed(range(READS)):
            content = self.shards.read(at.shard, at.start, at.start + at.size)
            self.staged.sound.discard(key)
            try:
                tensors = self._verify_sample(key, at, content)
            except DamagedSample:
                if not left:
                    raise
                continue
            copies.put(self._copy(at), content)
            return tensors
        raise AssertionError("unreachable")

    def _verify_sample(self, key: str, at: SampleLocation, content: bytearray) -> dict[str, Tensor]:
        """Return the tensors in a sample's bytes; verifies the checksum once per process."""
        where = f"{key[:80]!r} in shard {at.shard} of {self.shards} is damaged"
        try:
            tensors = sample_tensors(content, at.layout)
        except (ValueError, RuntimeError) as error:
            raise DamagedSample(f"{where} ({error})") from None
        if key not in self.staged.sound:
            if int(checksum(tensors), 16) != at.crc32:
                raise DamagedSample(f"{where} (its checksum does not match)")
            self.staged.note_sound(key)
        return tensors

    def _copy(self, at: SampleLocation) -> str:
        """Return the name of a sample's local copy; it includes the shard."""
        return f"{self.label}/{at.name}.{zlib.crc32(at.shard.encode()):08x}"

    def _sample_lock(self, at: SampleLocation) -> Lock:
        """Return a lock that one thread holds while it fetches this sample."""
        with self._lock:
            if len(self._fetching) > 4096:
                self._fetching = {name: lock for name, lock in self._fetching.items() if lock.locked()}
            return self._fetching.setdefault(at.name, Lock())

    def quarantine(self, key: str) -> str:
        with _store_errors():
            if self.location(key) is None and key not in self.staged:
                self.index.refresh()  # another process may have made a shard of it
            at = self.location(key)
            if at is None:
                return self.staged.quarantine(key)
            self.staged.sound.discard(key)
            place = self.shards.set_aside(at.name, at.shard)
        self.index.forget(at.name, at.shard)
        if self.copies is not None:
            self.copies.remove(self._copy(at))
        return place

    def _set_aside(self, key: str) -> str:
        return f"noted in {self.quarantine(key)}"


class ShardWriter:
    """Joins encoded samples into shards, and stores these."""

    def __init__(self, staged: FileCache, index: ShardIndex):
        self.staged, self.index, self.shards = staged, index, index.store
        self._new = (0, 0)  # files and bytes that this process has encoded since it joined last

    def note(self, size: int) -> None:
        """Note that a sample of so many bytes was encoded, and join the samples if they are enough for a shard."""
        self._new = self._new[0] + 1, self._new[1] + size
        if self._new[0] >= SAMPLES or self._new[1] >= BYTES:
            self.join(everything=False, wait=False)

    def join(self, everything: bool, wait: bool) -> None:
        """Join encoded samples into shards, and store them; if the store does not answer, they stay where they are.

        Args:
            everything: whether to join even fewer samples than a shard usually has.
            wait: whether to wait for another process that is doing so; otherwise leaves it to that one.
        """
        if self.shards.store.read_only or not self.staged.folder.is_dir():
            return
        with Ranges(self.staged.folder.parent / "joining.lock") as ranges, ranges.hold(0, 0, wait) as alone:
            if not alone:
                return
            self._new = (0, 0)
            for files, full in shards_of(sorted(self.staged.folder.glob(f"*{SUFFIX}"))):
                if full or everything:
                    self._store(files)
            self.index.publish(everything)

    def _store(self, files: list[Path]) -> None:
        """Store encoded samples as a shard, then remove their files."""
        new = [file for file in files if file.stem not in self.index.samples]
        for file in set(files) - set(new):  # left by a process that was killed before it removed them
            remove(file)
        if not new:
            return
        try:
            for file in new:  # each is verified once per process
                key = str((read_header(file).get("__metadata__") or {}).get("key"))
                if key not in self.staged.sound:
                    self.staged.load(key)
            damaged = {shard for _, shard in self.shards.list_damaged()}
            for again in count():  # until it has a name that no damaged shard has
                shard, joined = write_shard(new, self.staged.folder.parent / "joined", again)
                if shard not in damaged:
                    break
        except FileNotFoundError:
            return  # another process has set one aside, or joined them on a file system without locks
        header, start = parse_header(lambda end: _beginning(joined, end), shard, 8)
        self.shards.put(shard, joined)
        self.index.add(sample_locations(shard, header, start))
        for each in new:
            remove(each)


def _beginning(file: Path, count: int) -> bytes:
    with open(file, "rb") as handle:
        return handle.read(count)


def shards_of(files: list[Path]) -> Iterator[tuple[list[Path], bool]]:
    """Divide encoded samples into shards, each with whether it is full; the last one may not be."""
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


class SamplePrefetcher:
    """Fetches the samples of coming steps from object stores, in the plan's order, while the current step computes.

    Does not report a failed fetch: the step that needs the sample tries again, and reports its own failure.

    Args:
        needs: the samples that a step reads, as pairs of a cache and a key.
        steps: the run's number of steps.
        limit: the most bytes that are kept locally.
    """

    def __init__(self, needs: Callable[[int], Iterable[tuple[Cache, str]]], steps: int, limit: int):
        self._needs, self._steps, self._most = needs, steps, min(AHEAD, limit // 4)
        self._threads = ThreadPoolExecutor(THREADS, "prefetch")
        self._next = 0
        self._bytes: dict[int, int] = {}  # sizes for the current step and later ones

    def at(self, step: int) -> None:
        """Start fetching for a step and later ones, as far as the limits allow."""
        self._next = max(self._next, step)
        self._bytes = {known: size for known, size in self._bytes.items() if known >= step}
        while self._next < min(self._steps, step + STEPS) and (
            sum(self._bytes.values()) < self._most or self._next == step
        ):
            sizes = [(cache, key, cache.size_of(key)) for cache, key in self._needs(self._next)]
            for cache, key, size in sizes:
                if size:
                    self._threads.submit(cache.fetch, key)
            self._bytes[self._next] = sum(size for *_, size in sizes)
            self._next += 1

    def close(self) -> None:
        """Stop fetching."""
        self._threads.shutdown(wait=False, cancel_futures=True)
