"""Shards that are damaged, a disk that is full and a store that refuses: each part alone, without a server."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cached_samples import KEYS, bytes_in, fill, sample

from simpletune.data.storage import shard_cache, shard_index
from simpletune.data.storage.copies import LocalCopies
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.data.storage.shard_cache import ShardCache
from simpletune.data.storage.shard_index import TRIES, ShardIndex
from simpletune.data.storage.shards import HEADER_BYTES, ShardStore, parse_header
from simpletune.system.options import UserError
from simpletune.system.stores.folder_store import FolderStore
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import ObjectChanged, StoreError


def opened(folder: Path) -> ShardCache:
    cache = open_cache(CachePlace(folder, "shards"), "text", "a")
    assert isinstance(cache, ShardCache)
    return cache


def test_a_header_is_read_from_its_first_bytes_or_refused() -> None:
    text, asked = json.dumps({"a": 1}).encode(), []

    def read(content: bytes, first: int = 8) -> tuple[dict, int]:
        return parse_header(lambda end: asked.append(end) or content[:end], "s", first)

    whole = len(text).to_bytes(8, "little") + text
    assert read(whole + b"tensors") == ({"a": 1}, len(whole)) and asked == [8, len(whole)]
    assert read(whole + b"tensors", 99) == ({"a": 1}, len(whole)) and asked == [8, len(whole), 99]
    with pytest.raises(UserError, match="the shard s is damaged: it ends within its header. Remove it"):
        read(whole[:-1])
    for start in (b"", whole[:7], (1).to_bytes(8, "little") + b"{", (HEADER_BYTES + 1).to_bytes(8, "little")):
        with pytest.raises(UserError, match="the shard s is damaged: it does not start with a header. Remove it"):
            read(start)
    with pytest.raises(UserError, match="the shard s is damaged: its header is not JSON. Remove it"):
        read((2).to_bytes(8, "little") + b"{]")


@pytest.mark.parametrize("cut, reason", [(20, "it ends within its header"), (-8, "it is truncated")])
def test_a_cut_shard_is_named_and_its_samples_count_as_missing(cut: int, reason: str, tmp_path: Path, capsys) -> None:
    fill(opened(tmp_path), KEYS[:3])
    (shard,) = (tmp_path / "text/a/shards").glob("*.safetensors")
    (tmp_path / "text/a/index.parquet").unlink()
    shard.write_bytes(shard.read_bytes()[:cut])
    assert opened(tmp_path).index.samples.shards == {shard.stem}
    said = capsys.readouterr().out
    assert f"the shard {shard.stem} is damaged: {reason}. Remove it. Its samples count as missing" in said
    assert KEYS[0] not in opened(tmp_path)


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(opened(tmp_path), KEYS[:3])
    (tmp_path / "text/a/index.parquet").unlink()
    monkeypatch.setattr(shard_index, "HEADER", 16)
    again = opened(tmp_path)
    assert [again.load(key).keys() for key in KEYS[:3]] == [sample(key).keys() for key in KEYS[:3]]


def test_a_sample_is_set_aside_wherever_it_lies_or_it_is_said_what_to_do(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    fill(cache, KEYS[:3])
    row = cache.location(KEYS[1])
    assert row is not None
    assert cache.quarantine(KEYS[1]) == str(tmp_path / "text/a/damaged" / f"{row.name}.{row.shard}")
    assert [key in cache for key in KEYS[:3]] == [True, False, True]
    assert [key in opened(tmp_path) for key in KEYS[:3]] == [True, False, True]
    cache.save(KEYS[5], sample(KEYS[5]))  # in a file of its own, in no shard yet
    assert ".damaged" in cache.quarantine(KEYS[5]) and KEYS[5] not in cache

    def replace(key: str, content: bytes, known: str | None) -> None:
        raise StoreError("no rights to write")

    cache.shards.store.replace = replace  # type: ignore[assignment, method-assign]
    with pytest.raises(UserError, match="output.cache: no rights to write. Check the URL"):
        cache.quarantine(KEYS[2])
    assert KEYS[2] in cache


def test_an_index_that_others_keep_replacing_is_given_up_with_words(tmp_path: Path, capsys) -> None:
    fill(opened(tmp_path), KEYS[:3])

    class Busy(FolderStore):
        tries = 0

        def replace(self, key: str, content: bytes, known: str | None) -> str | None:
            self.tries += 1
            raise ObjectChanged("the object has changed")

    folder = tmp_path / "text/a"
    store = Busy(folder)
    (folder / "index.parquet").unlink()
    index = ShardIndex(ShardStore(store, folder / "shards"))
    index.refresh()
    index.publish(everything=True)
    assert store.tries == TRIES
    said = f"warning {store}: the index keeps changing: index.parquet stays as it is, and every start reads the headers"
    assert said in capsys.readouterr().out


def test_encoded_samples_are_divided_by_number_and_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{number}" for number in range(7)]
    for file, size in zip(files, (4, 4, 3, 12, 1, 1, 1), strict=True):
        file.write_bytes(bytes(size))

    def divided() -> list[tuple[str, bool]]:
        return [("".join(file.name for file in portion), full) for portion, full in shard_cache.shards_of(files)]

    monkeypatch.setattr(shard_cache, "BYTES", 10)
    assert divided() == [("01", True), ("2", True), ("3", True), ("456", False)]
    monkeypatch.setattr(shard_cache, "SAMPLES", 3)
    assert divided() == [("01", True), ("2", True), ("3", True), ("456", True)]
    files[0].unlink()  # another process has joined it
    assert divided() == [("12", True), ("3", True), ("456", True)]


def test_a_full_disk_keeps_half_of_the_local_part_and_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = LocalCopies(tmp_path, 8000)
    assert all(part.put(f"x/{number}", bytes(500)) for number in range(12))
    honest, number = Path.write_bytes, errno.ENOSPC

    def write(self: Path, data: bytes) -> int:
        honest(self, data[:10])
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "write_bytes", write)
    assert not part.put("x/new", bytes(500))
    assert bytes_in(part.folder) == 4000 and "x/new" not in part and not list((tmp_path / "x").glob(".*"))
    number = errno.EIO
    with pytest.raises(OSError, match="no"):
        part.put("x/new", bytes(500))
    assert bytes_in(part.folder) == 4000 and not list((tmp_path / "x").glob(".*"))


def test_a_store_notes_a_damaged_sample_once_and_a_web_server_says_what_to_do(tmp_path: Path) -> None:
    noted: list[tuple[str, bytes, str | None]] = []

    def replace(*asked: Any) -> None:
        noted.append(asked)
        raise ObjectChanged("another process was first")

    for url, read_only in (("https://host/cache", True), ("s3://bucket/cache", False)):
        store: Any = SimpleNamespace(url=url, replace=replace, read_only=read_only)
        shards = ShardStore(store, tmp_path / "journal")
        if read_only:
            with pytest.raises(UserError, match=f"sample n of shard s in {url} is damaged, .* Encode it again where"):
                shards.set_aside("n", "s")
            assert noted == []
        else:
            assert shards.set_aside("n", "s") == f"{url}/damaged/n.s"
            assert noted == [("damaged/n.s", b"", None)], "asked once: a note that is there need not be written again"
    with pytest.raises(UserError, match=r"^output\.cache: nothing://x cannot be opened \(.*\)\. Check the URL and the"):
        ObjectStore("nothing://x", "output.cache")
