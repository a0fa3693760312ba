"""Files of a stored run apart from checkpoints: checksums, what is damaged or deleted, hostile names, kept progress."""

from __future__ import annotations

import json
import re
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import object_store
import pytest
from object_store import BUCKET, Faults, faults, reached, server  # noqa: F401
from pydantic import ValidationError
from tiny_runs import merged, run_with

from simpletune.runs.remote import upload
from simpletune.runs.remote.index import INDEX, LostRun, RunIndex, link, read_index
from simpletune.system.options import UserError
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import StoreError


@pytest.fixture(autouse=True)
def retries_are_quick(reached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "AGAIN", 0.05)
    monkeypatch.setattr(upload, "LONGEST", 0.2)


@pytest.fixture
def kept(tiny_config: dict, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """A run of four steps in a bucket, which saves twice."""
    monkeypatch.chdir(tmp_path)
    output = tiny_config["output"] | {"runs": f"s3://{BUCKET}/{re.sub('[^a-z]', '-', request.node.name)}"}
    return tiny_config | {"checkpoint": {"every": 2}, "output": output}


def store_of(config: dict) -> ObjectStore:
    return ObjectStore(f"{config['output']['runs']}/{config['name']}")


def index_of(config: dict) -> RunIndex:
    found = read_index(store_of(config))
    assert found is not None
    return found[0]


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere" / "runs" / "tiny"


@pytest.mark.parametrize("where", ["in the store", "on the way"])
def test_a_flipped_bit_is_said_and_not_taken_over(
    kept: dict, where: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run_with(kept)
    store, index = store_of(kept), index_of(kept)
    assert set(index.files) == set(key for key in store.keys() if not key.startswith((INDEX, "checkpoints/")))
    names, rotten = ("config.json", "summary.json", "metrics.jsonl"), dict[str, bytes]()
    for name in names:
        content, tag = store.read(name) or pytest.fail("missing")
        rotten[name] = object_store._rotten(content)
        if where == "in the store":
            store.replace(name, rotten[name], tag)
    if where == "on the way":
        faults.choose = lambda number, method, path: "rot" if method == "GET" and path.endswith(names) else None
    there = elsewhere(tmp_path, monkeypatch)
    run_with(kept, "auto", train={"steps": 6})
    said = capsys.readouterr().out
    faults.choose = lambda number, method, path: None
    stored = store.keys()
    for name in names:
        assert re.search(rf"warning .*/{name} is damaged .*checksum.* it is left out", said)
        assert (there / f"{name}.damaged").read_bytes() == rotten[name]
        assert f"{name}.damaged" not in stored
        now, _ = store.read(name) or pytest.fail("missing")
        rows = [json.loads(line) for line in now.decode().splitlines()] if name.endswith("l") else json.loads(now)
        assert len(rows) == (2 if name.endswith("l") else len(rows))  # the rows of the steps since


@pytest.mark.parametrize("steps", [4, 6], ids=["finished", "goes on"])
def test_a_machine_that_reads_badly_takes_nothing_from_the_others(
    steps: int, kept: dict, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whether it goes on with the run or finds it finished, whatever it does not write anew stays in the index."""
    kept = merged(kept, validation={"loss_samples": 1})
    run_with(kept)
    before, names = index_of(kept).files, ("config.json", "metrics.jsonl", "eval_before.json", "evaluations.jsonl")
    faults.choose = lambda number, method, path: "rot" if method == "GET" and path.endswith(names) else None
    there = elsewhere(tmp_path, monkeypatch)
    for _ in range(2):  # its second start has the checkpoints already
        run_with(kept, "auto", train={"steps": steps})
        assert "eval_before.json is damaged" in capsys.readouterr().out
        written = {name for name in names if (there / name).exists()}
        assert written == (set() if steps == 4 else {"config.json", "metrics.jsonl", "evaluations.jsonl"})
        after = index_of(kept).files
        assert after.keys() >= set(names)
        assert {name for name in names if after[name] == before[name]} >= set(names) - written
    faults.choose = lambda number, method, path: None
    run_with(kept, "auto", train={"steps": steps})
    assert "damaged" not in capsys.readouterr().out, "a machine that reads well again fetches what it lacks"
    assert all((there / name).exists() for name in names)
    index, read = index_of(kept), store_of(kept).read
    for name in names:
        content, _ = read(name) or pytest.fail("missing")
        assert object_store.sha256(content).hexdigest() == index.files[name].sha256


def test_what_was_being_uploaded_when_a_process_died_is_taken_as_it_is(
    kept: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index names old and new content before the first is replaced."""
    run = run_with(kept)
    store, index = store_of(kept), index_of(kept)
    with open(run / "metrics.jsonl", "a") as handle:
        handle.write("\n")
    uploader = upload.Uploader(store, run, index, (read_index(store) or pytest.fail(""))[1], upload.Checkpoint())
    uploader._stored = {key: (0, 0) for key in index.files}
    put, keys = uploader._put, []

    def stop_after_two(content: object, key: str, known: object) -> None:
        if len(keys) == 2:
            raise StoreError("the power is gone")
        keys.append(key)
        put(content, key, known)  # type: ignore[arg-type]

    monkeypatch.setattr(uploader, "_put", stop_after_two)
    with pytest.raises(StoreError):
        uploader._upload_files()
    assert set(index_of(kept).arriving) >= {"metrics.jsonl"} and index_of(kept).files == index.files
    elsewhere(tmp_path, monkeypatch)
    capsys.readouterr()
    run_with(kept, "auto", train={"steps": 6})
    assert "warning" not in capsys.readouterr().out and not index_of(kept).arriving


def test_a_store_that_stops_answering_is_named_with_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Again and again, with the way out; and so does the end of the patience."""
    for name, seconds in {"SOON": 0.05, "REMINDED": 0.1, "AT_END": 0.5}.items():
        monkeypatch.setattr(upload, name, seconds)
    silent, index = threading.Event(), RunIndex(run="r", owner="x", machine="x")
    store = SimpleNamespace(url="s3://b/x", upload=lambda file, key: silent.wait(), keys=lambda *under: {})
    monkeypatch.setattr(upload.Uploader, "_commit", lambda self, **changes: None)
    (tmp_path / "big.bin").write_bytes(bytes(2**21))
    link(tmp_path, store.url, "r")
    said = r"not all of it could be uploaded to s3://b/x \(big.bin \(2.0 MiB\) has been on its way for \d s\)"
    with pytest.raises(UserError, match=f"{said}.*--resume auto to upload the rest"):
        with upload.Uploader(store, tmp_path, index, None, upload.Checkpoint()):  # type: ignore[arg-type]
            pass
    silent.set()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("upload  the rest to s3://b/x: ")]
    assert len(lines) >= 2
    assert all("big.bin (2.0 MiB) has been on its way for " in line for line in lines)
    assert all(line.endswith(" s more. Ctrl-C leaves it, and --resume auto uploads it") for line in lines)


def test_one_file_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight pictures of 4 MiB, and rows that are appended to while they are sent."""
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(bytes([number]) * 2**22)
    (tmp_path / "rows.jsonl").write_bytes(b"{}\n")
    index = RunIndex(owner="x", machine="x")
    uploader = upload.Uploader(ObjectStore(f"s3://{BUCKET}/x"), tmp_path, index, "", upload.Checkpoint())
    put: dict[str, bytes | Path] = {}
    monkeypatch.setattr(uploader, "_commit", lambda **changes: (tmp_path / "rows.jsonl").write_bytes(b"{}\n{}\n"))
    monkeypatch.setattr(uploader, "_put", lambda content, key, known: put.update({key: content[:4]}))
    tracemalloc.start()
    files = uploader._upload_files()
    assert tracemalloc.get_traced_memory()[1] < 9_000_000
    tracemalloc.stop()
    assert put["rows.jsonl"] == b"{}\n" and files["rows.jsonl"].size == 3 and len(put) == 9


def test_a_deleted_file_and_a_deleted_run_are_called_deleted(
    kept: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(kept)
    store = store_of(kept)
    store.remove(["summary.json"])
    there = elsewhere(tmp_path, monkeypatch)
    original = upload.Uploader._upload

    def upload_after_deletion(self: upload.Uploader, job: upload.UploadJob) -> None:
        if self.store.url == store.url:  # another test's upload may still be tried again
            store.remove(store.keys())
        original(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(upload.Uploader, "_upload", upload_after_deletion)
        with pytest.raises(LostRun, match="index.json has been deleted while .* --resume auto to .* store all of them"):
            run_with(kept, "auto", train={"steps": 6})
    assert "summary.json has been deleted: it is left out" in capsys.readouterr().out
    run_with(kept, "auto", train={"steps": 6})
    assert index_of(kept).finished and (there / "summary.json").is_file()


def test_a_bit_that_flips_on_its_way_up_is_refused_by_the_store(kept: dict, faults: Faults) -> None:
    """S3 compares the content with a checksum that the request carries; the upload is then repeated."""
    flipped = []

    def choose(number: int, method: str, path: str) -> object_store.Fault | None:
        if method == "PUT" and "trainable" in path and not flipped:
            flipped.append(path)
            return "rot"
        return None

    faults.choose = choose
    run_with(kept)
    store, index = store_of(kept), index_of(kept)
    assert flipped and max(index.checkpoints) == 4
    for stored in index.checkpoints.values():
        content, _ = store.read(f"{stored.folder}/trainable.safetensors") or pytest.fail("missing")
        assert object_store.sha256(content).hexdigest() == stored.files["trainable.safetensors"].sha256


def test_an_attempt_goes_on_where_the_last_one_failed(kept: dict, faults: Faults) -> None:
    """The last file of a checkpoint is refused, as some stores refuse clocks that differ; no other is sent again."""
    seen: list[str] = []

    def choose(number: int, method: str, path: str) -> object_store.Fault | None:
        if method != "PUT" or "checkpoints/" not in path:
            return None
        first = path not in seen
        seen.append(path)
        return "refused" if first and "trainable" in path else None

    faults.choose = choose
    run_with(kept)
    assert max(index_of(kept).checkpoints) == 4
    assert [path for path in set(seen) if seen.count(path) == 2 and "step-000004" in path and "trainable" in path]
    assert all(seen.count(path) == 1 for path in seen if "trainable" not in path)


@pytest.mark.parametrize("key", ["/abs/evil", "../../x", "a/../b", "a//b", "a\\b", "", "a/ b", "a\nb", "."])
def test_hostile_names_in_an_index_make_nothing_on_disk(kept: dict, key: str, tmp_path: Path) -> None:
    file = {"size": 1, "sha256": "0" * 64}
    checkpoint = {"folder": "checkpoints/step-000001.a", "files": {key: file}}
    for hostile in ({"files": {key: file}}, {"arriving": {key: file}}, {"checkpoints": {1: checkpoint}}):
        with pytest.raises(ValidationError):
            RunIndex.model_validate({"owner": "a", "machine": "m", **hostile})
