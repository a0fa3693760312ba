"""The cache as shards in a folder: what each sample is read from, what a kill leaves, damage, processes, conversion."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import failpoints
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cached_samples import KEYS, fill, require_all, sample
from safetensors.torch import load_file
from tiny_runs import run_with, saved_weights

from simpletune.config.load import validate
from simpletune.data.storage import cache as storage
from simpletune.data.storage import shard_cache, shard_index
from simpletune.data.storage.cache import FileCache
from simpletune.data.storage.claims import KeyRange
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.data.storage.shard_cache import ShardCache
from simpletune.data.storage.shard_index import SampleIndex, read_rows, write_rows
from simpletune.data.storage.shards import SampleLocation
from simpletune.runs.folder import read_metrics
from simpletune.stages.latent_cache import LatentCache
from simpletune.stages.text_cache import PromptEntries
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header
from simpletune.training.prepare import prepare_only


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of five samples."""
    monkeypatch.setattr(shard_cache, "SAMPLES", 5)


def opened(folder: Path) -> ShardCache:
    cache = open_cache(CachePlace(folder, "shards"), "text", "a")
    assert isinstance(cache, ShardCache)
    return cache


def child(work: Callable[[], None]) -> int:
    """Fork a process that does something; its exit code is 0 if that succeeds."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def shards_in(folder: Path) -> list[Path]:
    return sorted((folder / "text/a/shards").glob("*.safetensors"))


def test_samples_come_back_as_they_were_and_none_is_encoded_twice(tmp_path: Path) -> None:
    early = opened(tmp_path)
    assert KEYS[0] not in early
    assert sorted(fill(opened(tmp_path))) == sorted(KEYS)
    assert len(shards_in(tmp_path)) == 5 and not any((tmp_path / "text/a/staged").iterdir())
    require_all(early)  # what another process has joined meanwhile
    assert early.lacking(KEYS) == []
    again = opened(tmp_path)
    assert fill(again, [*KEYS, "another"]) == ["another"]
    require_all(again, [*KEYS, "another"])
    assert "nothing of the kind" not in again
    with pytest.raises(FileNotFoundError):
        again.load("nothing of the kind")


def test_shards_are_plain_safetensors_and_the_index_says_where_samples_lie(tmp_path: Path) -> None:
    """Read without the package: the format's header, the index and the bytes agree."""
    fill(opened(tmp_path))
    rows = {row["key"]: row for row in pq.read_table(tmp_path / "text/a/index.parquet").to_pylist()}
    assert rows.keys() == set(KEYS)
    for key, row in rows.items():
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        file = tmp_path / f"text/a/shards/{row['shard']}.safetensors"
        content = file.read_bytes()
        assert row["name"].hex() == name and hashlib.sha256(content).hexdigest()[:32] == row["shard"]
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:end])
        assert header["__metadata__"][name].split(" ", 1) == [f"{row['crc32']:08x}", key]
        expected, tensors = sample(key), load_file(file)
        for tensor, kind, shape, at in json.loads(row["tensors"]):
            assert torch.equal(tensors[f"{name}/{tensor}"], expected.pop(tensor))
            entry = header[f"{name}/{tensor}"]
            begin = end + entry["data_offsets"][0]
            assert (entry["dtype"], entry["shape"], begin) == (kind, shape, row["start"] + at)
        assert expected == {} and row["start"] % 8 == 0


@pytest.mark.parametrize("damage", ["missing", "empty", "old", "values"])
def test_the_index_is_made_again_from_the_shards(damage: str, tmp_path: Path, capsys) -> None:
    index = tmp_path / "text/a/index.parquet"
    fill(opened(tmp_path), KEYS[:7])
    old = index.read_bytes()
    fill(opened(tmp_path))
    whole = index.read_bytes()
    index.unlink()
    if damage == "values":
        table = pq.read_table(pa.BufferReader(whole))
        words = pa.array(["no layout"] * len(table)).dictionary_encode()
        pq.write_table(table.set_column(table.schema.get_field_index("tensors"), "tensors", words), index)
    elif damage != "missing":
        index.write_bytes(b"" if damage == "empty" else old)
    cache = opened(tmp_path)
    assert fill(cache) == []
    require_all(cache)
    assert ("is damaged" in capsys.readouterr().out) == (damage in ("empty", "values"))
    assert {row.key: row for row in read_rows(index.read_bytes())} == {row.key: row for row in read_rows(whole)}


LATER = ("file.before-rename", "shard.written", "shard.joined", "shard.cleared")
MOMENTS = ("shard.stored", *(pytest.param(moment, marks=pytest.mark.slow) for moment in LATER))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_loses_nothing_that_was_encoded(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def killed() -> None:
        failpoints.arm(moment, "kill", 14 if moment == "file.before-rename" else 2)
        fill(opened(tmp_path))

    assert os.waitpid(child(killed), 0)[1] == 9  # SIGKILL
    kept = [key for key in KEYS if key in opened(tmp_path)]
    assert len(kept) == 13 if moment == "file.before-rename" else len(kept) >= 10
    cache = opened(tmp_path)
    assert sorted(fill(cache)) == sorted(set(KEYS) - set(kept))
    require_all(cache)
    assert not any((tmp_path / "text/a/staged").iterdir()) and not list(
        (tmp_path / "text/a/joined").glob("*safetensors")
    )
    names = [row["name"] for row in pq.read_table(tmp_path / "text/a/index.parquet").to_pylist()]
    assert len(names) == len(set(names)) == len(KEYS)


@pytest.mark.parametrize("damage", ["values", "header"])
def test_a_damaged_sample_that_waits_for_its_shard_is_set_aside_whoever_needs_it(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process or run has left it."""
    left, mine = KEYS[:2]
    file = opened(tmp_path).staged.file(left)
    opened(tmp_path).save(left, sample(left))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content if damage == "values" else content[:20])
    assert opened(tmp_path).lacking([mine], KeyRange(1 - KeyRange(0, 2).owner(left), 2)) == [mine]
    assert f"renamed to {file.name}.damaged\n" in capsys.readouterr().out
    assert fill(opened(tmp_path), [left, mine]) == [left, mine]
    require_all(opened(tmp_path), [left, mine])


def test_processes_that_find_the_same_damage_keep_the_damaged_file(tmp_path: Path) -> None:
    first, second = FileCache(tmp_path), FileCache(tmp_path)
    first.save("a", {"x": torch.ones(3)})
    place = first.quarantine("a")
    assert second.quarantine("a") == place and Path(place).is_file()


def test_a_damaged_sample_is_noted_and_encoded_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(opened(tmp_path))
    row = opened(tmp_path).index.samples.find(FileCache(tmp_path).file(KEYS[3]).stem)
    assert row is not None
    file = tmp_path / f"text/a/shards/{row.shard}.safetensors"
    content = bytearray(file.read_bytes())
    content[row.start] ^= 1
    file.write_bytes(content)
    other = opened(tmp_path)
    other.staged.sound.clear()
    with pytest.raises(UserError, match=r"'prompt 3, ' in shard .* is damaged \(its checksum .* noted in .*Restart"):
        other.load(KEYS[3])
    (note,) = (tmp_path / "text/a/damaged").iterdir()
    assert note.name == f"{row.name}.{row.shard}" and KEYS[3] not in opened(tmp_path)
    note.unlink()
    capsys.readouterr()
    cache = opened(tmp_path)
    assert fill(cache) == [KEYS[3]] and note.exists()
    assert "encoding it again" in capsys.readouterr().out
    require_all(cache)
    require_all(opened(tmp_path))


@pytest.mark.parametrize("damage", ["missing", "cut", "no header"])
def test_samples_of_a_damaged_shard_are_encoded_again(damage: str, tmp_path: Path) -> None:
    fill(opened(tmp_path))
    shard = shards_in(tmp_path)[0]
    lost = {row.key for row in read_rows((tmp_path / "text/a/index.parquet").read_bytes()) if row.shard == shard.stem}
    content = shard.read_bytes()
    shard.unlink()
    if damage != "missing":
        shard.write_bytes(content[:-9] if damage == "cut" else b"x" * len(content))
    cache = opened(tmp_path)
    made = fill(cache)
    assert set(made) <= lost and len(made) == (1 if damage == "cut" else len(lost))
    require_all(cache)


def test_several_processes_fill_one_cache_and_encode_nothing_twice(tmp_path: Path) -> None:

    def filling(number: int) -> None:
        made = fill(opened(tmp_path), KEYS, KeyRange(number, 3))
        (tmp_path / f"made-{number}").write_text(json.dumps(made))

    children = [child(partial(filling, number)) for number in range(3)]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    made = [key for number in range(3) for key in json.loads((tmp_path / f"made-{number}").read_text())]
    assert sorted(made) == sorted(KEYS)
    cache = opened(tmp_path)
    assert cache.lacking(KEYS) == [] and not any((tmp_path / "text/a/staged").iterdir())
    require_all(cache)


@pytest.mark.parametrize("moment", ["seen", "opened"])
def test_a_file_that_another_process_removes_while_it_is_checked_is_no_error(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, seen = FileCache(tmp_path), FileCache.__contains__

    def removed_once_seen(self: FileCache, key: str) -> bool:
        there = seen(self, key)
        self.file(key).unlink(missing_ok=True)
        return there

    cache.save("a", {"x": torch.ones(3)})
    if moment == "seen":
        monkeypatch.setattr(FileCache, "__contains__", removed_once_seen)
    else:
        monkeypatch.setattr(storage, "open", lambda file, *_, **__: (file.unlink(), open(file, "rb")), raising=False)
    assert cache.lacking(["a"]) == ["a"]


def test_an_index_of_many_samples_is_small_and_finds_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 samples through every path of the index: added, sorted in, removed, written and read."""
    layout = (("x", "F32", (256,), 0),)
    rows = [
        SampleLocation(hashlib.md5(b"%d" % n).hexdigest(), f"shard {n // 256}", n % 256 * 1024, 1024, n, layout, str(n))
        for n in range(10_000)
    ]
    monkeypatch.setattr(shard_index, "RECENT", 3_000)
    index = SampleIndex()
    index.add(rows)
    index.add([SampleLocation(rows[7].name, "later", 0, 1024, 0, layout)])  # the first one stays
    for found in (index, SampleIndex.read(write_rows(rows, index.shards))):
        assert len(found) == 10_000 and found.find("0" * 32) is None
        assert all(found.find(row.name) == replace(row, key="") for row in (*rows[::501], rows[7]))
        assert found.bytes <= 40 * 10_000
        found.remove({"shard 3"}, [(rows[0].name, "shard 0"), (rows[1].name, "shard 1")])
        assert len(found) == 10_000 - 256 - 1 and rows[0].name not in found and rows[1].name in found
        assert "shard 3" not in found.shards and rows[3 * 256].name not in found


def test_the_index_is_not_written_for_every_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a million samples do not cost a thousand times the index."""
    monkeypatch.setattr(shard_cache, "SAMPLES", 1)
    monkeypatch.setattr(shard_index, "UNLISTED", 8)
    written = []
    monkeypatch.setattr(shard_index, "write_rows", lambda *rest: written.append(1) or write_rows(*rest))
    fill(opened(tmp_path), [f"{n}" for n in range(60)])
    assert len(shards_in(tmp_path)) == 60 and 2 <= len(written) <= 8


@pytest.mark.slow
def test_a_run_from_shards_has_the_bits_of_one_from_files(tiny_config: dict, tmp_path: Path) -> None:
    results = []
    for form, more in (("files", {}), ("shards", {"cache_form": "shards"})):
        folder = tmp_path / form
        run = run_with(tiny_config, output={"cache": str(folder), "runs": str(folder / "runs")} | more)
        rows = [[row[name] for name in ("step", "loss", "grad_norm")] for row in read_metrics(run)]
        results.append((rows, saved_weights(run, tiny_config["train"]["steps"])))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert len(list((tmp_path / "shards/latents").glob("*/shards/*.safetensors"))) == 2  # six pictures, five a shard
    assert not [*tmp_path.glob("shards/latents/*/*.safetensors"), *tmp_path.glob("files/*/*/shards")]


def test_a_cache_is_turned_into_the_other_form_without_encoding(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepared(place: str, form: str, source: str | None) -> CachePlace:
        output = tiny_config["output"] | {"cache": str(tmp_path / place), "cache_form": form}
        config = validate(tiny_config | {"output": output}, "test")
        prepare_only(config, source and str(tmp_path / source))
        return config.output.place

    def content(place: CachePlace) -> dict[str, dict[str, torch.Tensor]]:
        found = {}
        for kind in ("latents", "prompts"):
            (folder,) = (tmp_path / "files" / kind).iterdir()
            cache = open_cache(place, folder.parent.name, folder.name)
            keys = [read_header(file)["__metadata__"]["key"] for file in sorted(folder.glob("*.safetensors"))]
            found |= {f"{folder.name} {key}": cache.load(key) for key in keys}
        return found

    files = content(prepared("files", "files", None))
    assert len(files) == 2 * 6  # prompts and latents
    monkeypatch.setattr(PromptEntries, "_encode", lambda *rest: pytest.fail("it encodes"))
    monkeypatch.setattr(LatentCache, "_encode_one", lambda *rest: pytest.fail("it encodes"))
    capsys.readouterr()
    for place, form, source in (
        ("shards", "shards", "files"), ("again", "files", "shards"), ("again", "shards", "again"),
    ):  # fmt: skip
        found = content(prepared(place, form, source))
        assert found.keys() == files.keys()
        assert all(torch.equal(found[key][name], files[key][name]) for key in files for name in files[key])
        assert "copied  12 samples" in capsys.readouterr().out
    prepared("shards", "shards", "files")
    assert "copied  0 samples" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--from: .*nowhere is not a folder. Give the folder or the URL"):
        prepared("more", "shards", "nowhere")


def test_what_cannot_be_a_cache_is_refused(tiny_config: dict) -> None:
    for output, message in (
        ({"cache": "ftp://a/b"}, r"output.cache: ftp://a/b is not a store. Use s3://.*or a folder"),
        ({"cache": "s3://a/b", "cache_form": "files"}, r"output.cache_form: .*is an object store. Use shards"),
        ({"cache_local_gib": 0}, r"output.cache_local_gib"),
    ):
        with pytest.raises(UserError, match=message):
            validate(tiny_config | {"output": output}, "test")
