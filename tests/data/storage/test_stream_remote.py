"""Data sets in shards in an object store and on the hub: the same rows, copies within a limit, faults, and damage."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import stream_data
from fsspec.implementations.local import LocalFileSystem
from object_store import BUCKET, Faults, serving, settings
from stream_data import COUNT, copy_mds, rows_of, write_parquet

from simpletune.data.storage import shard_files as data_files
from simpletune.data.storage.dataset import open_rows
from simpletune.data.storage.rows import Columns, ShardedRows
from simpletune.data.storage.shard_files import DataFiles, split_url
from simpletune.system.options import UserError
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import RangeFile, StoreError

COLUMNS = Columns("image", "text", ("width", "height"))


def cells(rows: ShardedRows) -> list[tuple[object, object]]:
    return [(rows.image(number), rows.caption(number)) for number in range(len(rows))]


class LocalHub:
    """Stands for the hub's file system: a repository's files lie in a folder."""

    root = Path()

    def __init__(self) -> None:
        self.files = LocalFileSystem()

    def find(self, path: str, detail: bool) -> dict[str, dict[str, Any]]:
        assert detail and path.startswith("datasets/owner/name")
        place = self.root / path.removeprefix("datasets/owner/name").strip("/")
        found = self.files.find(str(place), detail=True)
        names = {"datasets/owner/name/" + Path(name).relative_to(self.root).as_posix(): a for name, a in found.items()}
        return {name: {"size": about["size"], "blob_id": f"{about['ino']}"} for name, about in names.items()}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        return self.files.cat_file(str(self.root / path.removeprefix("datasets/owner/name/")), start=start, end=end)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the one repository that the hub has."""
    monkeypatch.setattr("huggingface_hub.HfFileSystem", LocalHub)
    monkeypatch.setattr(LocalHub, "root", tmp_path / "hub")
    return tmp_path / "hub"


def test_urls_are_split_into_folder_and_pattern() -> None:
    assert split_url("s3://b/x/y/") == ("s3://b/x/y", "")
    assert split_url("s3://b/x/*/train-*.parquet") == ("s3://b/x", "*/train-*.parquet")
    assert split_url("hf://datasets/o/n/data/a.parquet") == ("hf://datasets/o/n/data", "a.parquet")


@pytest.mark.parametrize("ending", ["", "/data", "/data/*.parquet"])
def test_a_data_set_on_the_hub_gives_the_rows_of_its_files(ending: str, hub: Path) -> None:
    write_parquet(hub / "data", rows_of(20))
    (hub / "README.md").write_text("about")
    rows = open_rows(f"hf://datasets/owner/name{ending}", COLUMNS, split="train")
    assert cells(rows) == cells(open_rows(str(hub), COLUMNS))
    one = open_rows("hf://datasets/owner/name/data/train-00001-of-00003.parquet", COLUMNS)
    assert cells(one) == cells(rows)[7:14]


@pytest.mark.parametrize("form", ["zstd", "bare"])
def test_a_data_set_in_a_store_gives_the_rows_of_its_files(form: str, tmp_path: Path) -> None:
    place = copy_mds(form, tmp_path / form)
    rows = open_rows(f"file://{place}", COLUMNS, local=tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 1, "opening fetches the index"
    assert cells(rows) == cells(open_rows(str(place), COLUMNS)) and len(rows) == COUNT
    kept = sorted(file.stat().st_size for file in (tmp_path / "kept").iterdir())
    assert kept == sorted(file.stat().st_size for file in place.iterdir()), "every file once"


def test_copies_stay_within_their_limit_and_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = copy_mds("plain", tmp_path / "plain")
    fetched, honest = [], DataFiles._pieces
    monkeypatch.setattr(
        DataFiles, "_pieces", lambda self, name, *span: fetched.append(name) or honest(self, name, *span)
    )
    rows = open_rows(f"file://{place}", COLUMNS, local=tmp_path / "kept", local_gib=2000 / 2**30)
    for number in (0, 7, 3, 0):
        assert rows.image(number) == cells(open_rows(str(place), COLUMNS))[number][0]
        assert sum(file.stat().st_size for file in (tmp_path / "kept").iterdir()) <= 2000
    assert fetched == ["index.json", *(f"shard.0000{number}.mds" for number in (0, 2, 1, 0))]


def test_a_changed_object_is_not_taken_for_its_copy(tmp_path: Path) -> None:
    place = copy_mds("bare", tmp_path / "bare")
    before = open_rows(f"file://{place}", COLUMNS, local=tmp_path / "kept")
    old = before.image(0)
    file = place / "shard.00000.mds"
    file.write_bytes(file.read_bytes().replace(old[-30:-20], b"0123456789"))
    after = open_rows(f"file://{place}", COLUMNS, local=tmp_path / "kept")
    assert after.image(0) != old and after.key(0) != before.key(0)


def test_a_range_file_reads_what_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(bytes(range(100)))
    file = RangeFile(partial(ObjectStore(f"file://{tmp_path}").read_range, "x.parquet"), 100)
    assert file.seek(-3, 2) == 97 and file.read(10) == bytes([97, 98, 99]) and file.read(1) == b""
    assert file.seek(5) == 5 and file.seek(2, 1) == 7 and file.read(2) == bytes([7, 8]) and file.tell() == 9
    assert len(file.read()) == 91


def test_a_store_that_fails_within_a_file_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = open_rows(f"file://{write_parquet(tmp_path / 'rows', rows_of(20))}", COLUMNS)
    monkeypatch.setattr(ObjectStore, "read_range", Mock(side_effect=StoreError("reading x failed")))
    with pytest.raises(UserError, match=r"^data.path: reading x failed. Check the name, the conn") as error:
        rows.image(0)
    assert error.value.code == 3


@pytest.mark.slow
def test_a_bucket_with_faults_gives_the_same_rows_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet, mds = write_parquet(tmp_path / "rows", rows_of(20)), stream_data.ASSETS / "zstd"
    monkeypatch.setattr(data_files, "PIECE", 300)  # several requests a shard
    faults = Faults()
    with serving(faults) as url:
        for name, value in settings(url).items():
            monkeypatch.setenv(name, value)
        for folder in (parquet, mds):
            store = ObjectStore(f"s3://{BUCKET}/{folder.name}")
            for file in folder.iterdir():
                store.upload(file, file.name)
        for kind in ("error", "cut", "short"):
            faults.choose = lambda number, method, path, kind=kind: (
                kind if number % 4 == 1 and method == "GET" and "list-type" not in path else None
            )
            for folder in (parquet, mds):
                rows = open_rows(f"s3://{BUCKET}/{folder.name}", COLUMNS, local=tmp_path / kind)
                assert cells(rows) == cells(open_rows(str(folder), COLUMNS))
            assert faults.injected > 0
            faults.injected = 0
        faults.choose = lambda number, method, path: "error" if "train-00001" in path else None
        with pytest.raises(UserError, match=r"train-00001-of-00003.parquet .*failed") as error:
            open_rows(f"s3://{BUCKET}/rows", COLUMNS)
        assert error.value.code == 3
