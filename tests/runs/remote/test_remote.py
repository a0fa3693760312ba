"""A run kept in an object store: moto's S3 server, faults between, machines that vanish."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import failpoints
import object_store
import pytest
import torch
from launching import Launcher
from object_store import BUCKET, Fault, Faults, faults, reached, server  # noqa: F401
from tiny_runs import TrainOnce, run_with, saved_weights

from simpletune.apps.cli import main as cli_main
from simpletune.config.load import validate
from simpletune.runs.checkpoint_folders import checkpoint_folder
from simpletune.runs.folder import read_metrics
from simpletune.runs.remote import upload
from simpletune.runs.remote.index import INDEX, LostRun, RunIndex, put_index, read_index, take
from simpletune.system import signals
from simpletune.system.options import UserError
from simpletune.system.stores import object_store as store_module
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import ObjectChanged, StoreError

URL = f"s3://{BUCKET}/runs"


@pytest.fixture(autouse=True)
def retries_are_quick(reached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "AGAIN", 0.05)
    monkeypatch.setattr(upload, "LONGEST", 0.2)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Moves to another machine: another current folder, where a run's folder lies."""

    def move(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    return move


@pytest.fixture
def kept(tiny_config: dict, request: pytest.FixtureRequest) -> dict:
    """A run of six steps that saves after every second one, in a part of the bucket that the test has for itself."""
    name = re.sub(r"\W", "-", request.node.name)
    output = tiny_config["output"] | {"runs": f"{URL}/{name}"}
    return tiny_config | {"train": {"steps": 6}, "checkpoint": {"every": 2}, "output": output}


def store_of(config: dict) -> ObjectStore:
    return ObjectStore(f"{config['output']['runs']}/{config['name']}")


def require_index(config: dict) -> RunIndex:
    found = read_index(store_of(config))
    assert found is not None
    return found[0]


def require_whole(config: dict) -> RunIndex:
    """Every file of every checkpoint that the index names is in the store, with the bytes that it was saved with."""
    store, index = store_of(config), require_index(config)
    for stored in index.checkpoints.values():
        for name, file in stored.files.items():
            content, _ = store.read(f"{stored.folder}/{name}") or pytest.fail(f"{name} is missing")
            assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
    named = {each.folder for each in index.checkpoints.values()}
    assert {"/".join(key.split("/")[:2]) for key in store.keys("checkpoints/")} == named
    return index


def wait_for_uploads(patch: pytest.MonkeyPatch) -> None:
    """Let training wait until each checkpoint is in the store."""
    original = upload.Uploader.note_saved

    def saved(self: upload.Uploader, step: int) -> None:
        original(self, step)
        while not self._is_done():
            time.sleep(0.01)

    patch.setattr(upload.Uploader, "note_saved", saved)


def same(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == other.keys() and all(torch.equal(ours[name], other[name]) for name in ours)


def test_another_machine_continues_with_the_same_bits(
    kept: dict, machine, train_once: TrainOnce, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("a")
    failpoints.arm("step.begun", "term", 4)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(signals.Stopped), signals.handle_signals():
        wait_for_uploads(patch)
        run_with(kept)
    assert list(require_whole(kept).checkpoints) == [2, 4]
    second = machine("b")
    capsys.readouterr()
    listed, keys = [], ObjectStore.keys

    def keys_at_the_third_try(self: ObjectStore, *prefix: str) -> dict[str, int]:
        listed.append(prefix)
        if len(listed) < 3:
            raise StoreError("the list ended early")
        return keys(self, *prefix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "keys", keys_at_the_third_try)
        run = run_with(kept, "auto")
    said = capsys.readouterr().out
    assert re.search(r"store .*2 checkpoints, the last of step 4", said) and "resume  from" in said
    assert run.resolve() == second / "runs" / "tiny"
    whole = train_once(kept)
    assert same(saved_weights(run, 6), saved_weights(whole, 6))
    assert [row["loss"] for row in read_metrics(run)] == [row["loss"] for row in read_metrics(whole)]
    index = require_whole(kept)
    assert index.finished and list(index.checkpoints) == [4, 6]
    result, _ = store_of(kept).read("pytorch_lora_weights.safetensors") or pytest.fail("no result")
    assert result == (run / "pytorch_lora_weights.safetensors").read_bytes()
    rows = (store_of(kept).read("metrics.jsonl") or pytest.fail("no metrics"))[0].decode().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    capsys.readouterr()
    run_with(kept, "auto")
    assert "already finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "moment",
    [
        "remote.uploaded",
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("remote.file", "remote.committed")),
    ],
)
def test_a_machine_that_vanishes_while_it_uploads_loses_nothing_that_was_whole(
    kept: dict, machine, launcher: Launcher, train_once: TrainOnce, server: str, moment: str
) -> None:
    code = (
        "import json, os, sys; os.chdir(sys.argv[1]); "
        "from simpletune.config.load import validate; from simpletune.training.train import train; "
        "import failpoints; failpoints.arm(sys.argv[3], 'kill', 2); "
        "train(validate(json.loads(sys.argv[2]), 'test'), 'auto')"
    )
    words = [str(machine("a")), json.dumps(kept), moment]
    assert launcher.programs(code, words, environment=object_store.settings(server)).codes == [-9]
    lost = 6 - max(require_index(kept).checkpoints, default=0)
    machine("b")
    run = run_with(kept, "auto")
    index = require_whole(kept)
    assert index.finished and max(index.checkpoints) == 6
    assert same(saved_weights(run, 6), saved_weights(train_once(kept), 6))
    assert lost <= 6 - (2 if moment == "remote.uploaded" else 0)


def every(count: int) -> Callable[[int, str, str], Fault | None]:
    """Faults of every ``count``-th request, but at most two in a row for one file: requests at once that are tried
    again may go round in step, so that one of them would always be the ``count``-th."""
    kinds: tuple[Fault, ...] = ("error", "cut", "short", "slow")
    failed = Counter[tuple[str, str]]()

    def choose(number: int, method: str, path: str) -> Fault | None:
        if number % count or failed[method, path] == 2:
            failed[method, path] = 0
            return None
        failed[method, path] += 1
        return kinds[number // count % 4]

    return choose


def test_faults_are_mended_or_said(kept: dict, machine, faults: Faults, capsys: pytest.CaptureFixture[str]) -> None:
    """Every third request of an upload fails, is cut or slow, or its answer ends early; then every fifth of a fetch."""
    machine("a")
    before = faults.injected
    faults.choose = every(3)
    run = run_with(kept)
    assert faults.injected - before > 10
    faults.choose = lambda number, method, path: None
    assert max(require_whole(kept).checkpoints) == 6
    faults.choose = every(5)
    machine("b")
    other = run_with(kept, "latest", train={"steps": 8})
    assert same(saved_weights(run, 6), saved_weights(other, 6)) and saved_weights(other, 8)


def test_a_store_that_fails_for_good_leaves_training_alone_and_is_reported(
    kept: dict, machine, faults: Faults, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upload, "AT_END", 1.0)
    monkeypatch.setattr(store_module, "RETRIES", {"max_retries": 0})
    folder = machine("a")
    faults.choose = lambda number, method, path: "error" if method == "PUT" and INDEX not in path else None
    with pytest.raises(UserError, match="not all of it could be uploaded.*--resume auto"):
        run_with(kept)
    said = capsys.readouterr().out
    assert said.count("Training continues, and the upload is retried") == 1
    assert (folder / "runs" / "tiny" / "summary.json").exists() and not (
        folder / "runs" / "tiny" / ".upload.part"
    ).exists()
    assert not require_index(kept).checkpoints
    faults.choose = lambda number, method, path: None
    (folder / "runs" / "tiny" / ".upload.part" / "1").mkdir(parents=True)  # left by a process killed in its last upload
    monkeypatch.setattr(upload, "AT_END", 60.0)
    run_with(kept, "auto")  # the same command uploads the rest
    assert require_whole(kept).finished


def test_the_machine_that_lost_its_run_stops(kept: dict, machine) -> None:
    machine("a")
    store = store_of(kept)

    original = upload.Uploader._upload

    def upload_after(self: upload.Uploader, job: upload.UploadJob) -> None:
        if job.step and require_index(kept).machine != "other":
            take(store, lambda stored: stored.model_copy(update={"owner": "0" * 32, "machine": "other"}))  # type: ignore[union-attr]
        original(self, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload.Uploader, "_upload", upload_after)
        with pytest.raises(LostRun, match="continued on other since .*Stop one of the two"):
            run_with(kept)
    assert require_index(kept).owner == "0" * 32 and not require_index(kept).checkpoints


def test_who_lost_the_run_removes_nothing_of_the_new_owner(
    kept: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old checkpoints could not be listed; until it is tried again, another machine takes over and saves."""
    monkeypatch.chdir(tmp_path)
    run = run_with(kept)
    store, job = store_of(kept), upload.UploadJob(6, tmp_path / "staged")
    index, tag = read_index(store) or pytest.fail("no index")
    index = index.model_copy(update={"checkpoints": {}})
    uploader = upload.Uploader(store, run, index, tag, upload.Checkpoint(every=2))
    shutil.copytree(checkpoint_folder(run, 6), tmp_path / "staged")
    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(ObjectStore, "keys", Mock(side_effect=StoreError("listing is not allowed")))
        uploader._upload(job)
    assert list(require_index(kept).checkpoints) == [6]
    store.upload(b"new", "checkpoints/step-000008.other/state.json")
    take(store, lambda stored: stored.model_copy(update={"owner": "0" * 32, "machine": "other"}))  # type: ignore[union-attr]
    shutil.copytree(checkpoint_folder(run, 6), tmp_path / "staged")
    with pytest.raises(LostRun):
        uploader._upload(job)
    assert "checkpoints/step-000008.other/state.json" in store.keys("checkpoints/")


def test_a_damaged_checkpoint_is_said_and_an_older_one_taken(
    kept: dict, machine, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = machine("a") / "runs" / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        wait_for_uploads(patch)
        run_with(kept)
    store, index = store_of(kept), require_index(kept)
    assert list(index.checkpoints) == [4, 6]  # so machine b writes no checkpoint before the damaged one
    key = f"{index.checkpoints[6].folder}/trainable.safetensors"
    content, tag = store.read(key) or pytest.fail("missing")
    store.replace(key, bytes(len(content)), tag)
    machine("b")
    run = run_with(kept, "auto")
    assert re.search(r"warning .*trainable.safetensors is damaged .*step 6 is left out", capsys.readouterr().out)
    assert same(saved_weights(run, 6), saved_weights(whole, 6))
    require_whole(kept)


def test_checkpoints_after_the_one_that_a_run_continues_from_are_replaced(kept: dict, machine) -> None:
    """Also those of steps at which it saves nothing."""
    machine("a")
    with pytest.MonkeyPatch.context() as patch:
        wait_for_uploads(patch)
        first = run_with(kept, checkpoint={"every": 1, "keep_last": 6})
    before = require_index(kept)
    assert list(before.checkpoints) == [1, 2, 3, 4, 5, 6]
    run_with(kept, str(checkpoint_folder(first, 2)), checkpoint={"every": 6, "keep_last": 6})
    after = require_index(kept)
    assert list(after.checkpoints) == [1, 2, 6]
    assert after.checkpoints[6].folder != before.checkpoints[6].folder


def test_a_stored_run_is_not_replaced(kept: dict, machine) -> None:
    machine("a")
    run_with(kept, train={"steps": 2})
    machine("b")
    with pytest.raises(UserError, match="already holds a run .*Use --resume auto .*name=") as caught:
        run_with(kept)
    assert kept["output"]["runs"] in str(caught.value)
    machine("c")
    run_with(kept, train={"steps": 2}, output={"runs": "runs"})
    with pytest.raises(UserError, match="is not the run that .* holds"):
        run_with(kept, "auto")


def test_a_slow_upload_skips_to_the_newest_checkpoint(kept: dict, machine, faults: Faults) -> None:
    machine("a")
    seen: list[int | None] = []
    original = upload.Uploader._upload

    def slow(self: upload.Uploader, job: upload.UploadJob) -> None:
        seen.append(job.step)
        while job.step == 1 and (self._waiting is None or (self._waiting.step or 0) < 5):
            time.sleep(0.01)  # until the run has saved step 5
        original(self, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload.Uploader, "_upload", slow)
        run = run_with(kept, checkpoint={"every": 1})
    assert seen[0] == 1 and 3 not in seen and seen[-1] in (6, None)
    assert max(require_whole(kept).checkpoints) == 6 and run.joinpath("summary.json").exists()


def test_an_index_is_replaced_only_by_who_has_read_it(kept: dict) -> None:
    store = store_of(kept)
    first, tag = take(store, lambda stored: RunIndex(owner="a", machine="m"))
    changed = first.model_copy(update={"finished": True})
    again = put_index(store, changed, tag)
    assert put_index(store, changed, tag) == again  # as if the first answer had been lost
    second, _ = take(store, lambda stored: RunIndex(run=first.run, owner="b", machine="n"))
    with pytest.raises(LostRun, match="continued on n"):
        put_index(store, changed, again)
    with pytest.raises(ObjectChanged):
        store.replace(INDEX, b"{}", None)
    assert read_index(store)[0] == second  # type: ignore[index]


def test_a_damaged_index_is_named(kept: dict) -> None:
    store, tag = store_of(kept), None
    for content in (b"", b"[]", b"\xff", b'{"version": 1, "owner": 1}', b'{"checkpoints": {"x": {}}}'):
        tag = store.replace(INDEX, content, tag)
        with pytest.raises(UserError, match=r"index.json is damaged"):
            read_index(store)


@pytest.mark.parametrize("fault", ["error", "cut", "short", "slow"])
def test_a_range_is_read_again_where_the_store_fails(kept: dict, faults: Faults, fault: Fault) -> None:
    store, content = store_of(kept), bytes(range(256)) * 40
    store.replace("file", content, None)
    assert (store.keys()["file"], store.read("other")) == (len(content), None)
    first = faults.seen + 1
    faults.choose = lambda number, method, path: fault if number == first else None
    assert store.read_range("file", 1000, 9000) == content[1000:9000]
    assert faults.seen == first + (fault != "slow")
    assert store.read_range("file", 5, 5) == b"" and faults.seen == first + (fault != "slow")


def test_an_index_is_read_again_where_the_client_gives_up(kept: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(kept)
    index, tag = take(store, lambda stored: RunIndex(owner="a", machine="m"))
    honest, broken = store.read(INDEX), StoreError("the answer ended early")
    monkeypatch.setattr(ObjectStore, "read", Mock(side_effect=[broken, broken, honest]))
    assert read_index(store) == (index, tag)


def test_what_is_never_whole_is_an_error(kept: dict, faults: Faults, tmp_path: Path) -> None:
    store = store_of(kept)
    store.replace("file", bytes(1000), None)
    with pytest.raises(StoreError, match="file .* gave 990 bytes instead of 1,990"):
        store.read_range("file", 10, 2000)
    with pytest.raises(StoreError, match="reading bytes 0 to 10 of other .* failed"):
        store.read_range("other", 0, 10)
    faults.choose = lambda number, method, path: "short"
    with pytest.raises(StoreError, match="gave 500 bytes instead of 1,000"):
        store.read_range("file", 0, 1000)
    with pytest.raises(StoreError, match="file gave 500 bytes instead of 1000"):
        store.fetch("file", tmp_path / "fetched", 1000)
    assert not (tmp_path / "fetched").exists()


def test_other_urls_and_buckets_are_refused(tiny_config: dict, machine) -> None:
    for place in ("ftp://a/b", "http://a/b", "s3://"):
        with pytest.raises(UserError, match=r"output.runs: .*is not a store. Use s3://"):
            validate(tiny_config | {"output": {"runs": place}}, "test")
    with pytest.raises(UserError, match=r"output.profiles: s3://a/b must be a folder"):
        validate(tiny_config | {"output": {"profiles": "s3://a/b"}}, "test")
    machine("a")
    output = tiny_config["output"] | {"runs": "s3://no-such-bucket/runs"}
    with pytest.raises(UserError, match="output.runs: .*no-such-bucket.*Check the URL, the credentials"):
        run_with(tiny_config | {"output": output})


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(UserError, match=r"obstore.* -m pip install -e '.*\[remote\]'") as caught:
        ObjectStore("s3://bucket/x")
    assert caught.value.code == 3


def test_check_names_the_store(kept: dict, write_config, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["check", str(write_config(kept))]) == 0
    assert kept["output"]["runs"] in capsys.readouterr().out
