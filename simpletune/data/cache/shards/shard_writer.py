"""Join encoded samples, stored as single files, into shards, and store these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simpletune.data.cache.cache import Cache
from simpletune.data.cache.shards.shard import SUFFIX, parse_header, sample_locations, write_shard
from simpletune.data.cache.shards.shard_index import ShardIndex
from simpletune.data.cache.shards.shard_store import ShardStore
from simpletune.system.atomic import remove
from simpletune.system.locks import Ranges

SAMPLES, BYTES = 256, 64 * 2**20  # limits of a shard; the first one reached closes it


class ShardWriter:
    """Joins the files of one cache.

    Args:
        cache: the cache of the encoded samples.
        shelf: where the shards go.
        catalogue: the samples that are there.
    """

    def __init__(self, cache: Cache, shelf: ShardStore, catalogue: ShardIndex):
        self.cache, self.shelf, self.catalogue = cache, shelf, catalogue
        self._staged = (0, 0)  # files and bytes that this process has encoded since it joined last

    def has_enough(self, size: int) -> bool:
        """Note the bytes of an encoded sample; return whether there are enough for a shard."""
        self._staged = self._staged[0] + 1, self._staged[1] + size
        return self._staged[0] >= SAMPLES or self._staged[1] >= BYTES

    def join(self, everything: bool, wait: bool) -> None:
        """Join encoded samples into shards, and store them.

        Args:
            everything: whether to join even fewer samples than a shard usually has.
            wait: whether to wait for another process that is doing so; otherwise leaves it to that one.

        Raises:
            StoreError: the store does not answer; the samples stay where they are.
        """
        if self.shelf.read_only or not self.cache.folder.is_dir():
            return
        with Ranges(self.cache.folder.parent / "joining.lock") as ranges, ranges.held(0, 0, wait) as alone:
            if not alone:
                return
            self._staged = (0, 0)
            for files, full in _shards_of(sorted(self.cache.folder.glob(f"*{SUFFIX}"))):
                if full or everything:
                    self._store(files)
            self.catalogue.publish(everything)

    def _store(self, files: list[Path]) -> None:
        """Store encoded samples as a shard, then remove their files."""
        new = [file for file in files if file.stem not in self.catalogue.index]
        for file in set(files) - set(new):  # left by a process that was killed before it removed them
            remove(file)
        try:
            for file in new:
                self._require_sound(file)
            if not new:
                return
            shard, file = self._written(new)
        except FileNotFoundError:
            return  # another process has joined them, on a file system without locks
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            handle.seek(0)
            parsed = parse_header(handle.read(8 + length), shard)
        assert not isinstance(parsed, int)
        self.shelf.put(shard, file)
        self.catalogue.add(shard, sample_locations(shard, *parsed))
        for each in new:
            remove(each)

    def _written(self, files: list[Path]) -> tuple[str, Path]:
        """Write a shard under a name that no damaged shard has."""
        damaged, again = {shard for _, shard in self.shelf.damaged()}, 0
        while (written := write_shard(files, self.cache.folder.parent / "joined", again))[0] in damaged:
            again += 1
        return written

    def _require_sound(self, file: Path) -> None:
        """Verify the checksum of an encoded sample, once per process.

        Raises:
            UserError: it is damaged, and was renamed.
        """
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            key = str((handle.metadata() or {}).get("key"))
        if not self.cache.is_sound(key):
            Cache.load(self.cache, key)


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
