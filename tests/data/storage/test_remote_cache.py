"""The cache in an object store: moto's S3 server, faults between, and a web server that honours ranges."""

from __future__ import annotations

import os
import re
import shutil
import threading
from functools import partial
from pathlib import Path

import object_store
import pytest
import torch
from cached_samples import KEYS as ALL_KEYS
from cached_samples import bytes_in, sample
from cached_samples import fill as fill_with
from cached_samples import require_all as require_those
from launching import Launcher
from object_store import BUCKET, Fault, Faults, faults, reached, server  # noqa: F401
from ranges_server import serving_ranges
from tiny_runs import run_with, saved_weights

from simpletune.data.storage import shard_cache
from simpletune.data.storage.cache import name_of
from simpletune.data.storage.copies import LocalCopies
from simpletune.data.storage.place import GIB, CachePlace, open_cache
from simpletune.data.storage.shard_cache import ShardCache
from simpletune.data.storage.shard_index import read_rows
from simpletune.runs.folder import read_metrics, read_summary
from simpletune.stages.text_cache import PromptEntries
from simpletune.system.atomic import machine_name
from simpletune.system.options import UserError
from simpletune.system.stores.object_store import ObjectStore

KEYS = ALL_KEYS[:11]  # a request takes moto several milliseconds


fill, require_all = partial(fill_with, keys=KEYS), partial(require_those, keys=KEYS)


@pytest.fixture(autouse=True)
def shards_are_small(reached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "SAMPLES", 5)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A part of the bucket that the test has for itself."""
    return f"s3://{BUCKET}/{re.sub(r'[^A-Za-z0-9]+', '-', request.node.name)}"


def opened(folder: Path, url: str, limit: int = GIB) -> ShardCache:
    cache = open_cache(CachePlace(folder, "shards", url, limit), "text", "a")
    assert isinstance(cache, ShardCache) and cache.remote
    return cache


def test_another_machine_reads_what_one_has_encoded(tmp_path: Path, url: str, faults: Faults) -> None:
    assert sorted(fill(opened(tmp_path / "a", url))) == sorted(KEYS)
    assert len(ObjectStore(f"{url}/text/a").keys("shards/")) == 3
    other = opened(tmp_path / "b", url)
    assert fill(other) == []
    before = faults.seen
    require_all(other)
    assert faults.seen - before == len(KEYS) and other.waited > 0
    waited = other.waited
    require_all(other)
    require_all(opened(tmp_path / "b", url))  # a later process
    assert other.waited == waited
    more = [*KEYS, "more"]
    assert fill(opened(tmp_path / "b", url), keys=more) == ["more"]
    late = opened(tmp_path / "a", url)
    assert fill(late, keys=more) == []
    require_all(late, keys=more)


SLOW_FAULTS = [pytest.param(fault, marks=pytest.mark.slow) for fault in ("error", "cut", "slow")]


@pytest.mark.parametrize("fault", ["short", *SLOW_FAULTS])
def test_what_the_store_answers_wrongly_is_asked_again(fault: Fault, tmp_path: Path, url: str, faults: Faults) -> None:
    faults.choose = lambda number, method, path: fault if number % 3 == 0 else None
    fill(opened(tmp_path / "a", url))
    other = opened(tmp_path / "b", url)
    assert fill(other) == []
    require_all(other)
    assert faults.injected > 0
    faults.choose = lambda number, method, path: None
    require_all(opened(tmp_path / "c", url))


def test_a_store_that_does_not_answer_is_named_and_loses_nothing(tmp_path: Path, url: str, faults: Faults) -> None:
    cache = opened(tmp_path / "a", url)
    assert cache.lacking(KEYS) == KEYS
    faults.choose = lambda number, method, path: "error" if method in ("PUT", "POST") else None
    with pytest.raises(UserError, match=r"output.cache: uploading .* failed .*what was encoded is kept"):
        fill(cache)
    faults.choose = lambda number, method, path: None
    assert 0 < len(fill(opened(tmp_path / "a", url))) < len(KEYS)
    require_all(opened(tmp_path / "b", url))
    faults.choose = lambda number, method, path: "error"
    with pytest.raises(UserError, match=r"output.cache: .*Check the URL, the credentials"):
        opened(tmp_path / "c", url).load(KEYS[0])


FILL = """
import sys; sys.path.insert(0, sys.argv[4])
from pathlib import Path
import failpoints
from simpletune.data.storage import shard_cache
from simpletune.data.storage.place import CachePlace, open_cache
from cached_samples import KEYS, fill
shard_cache.SAMPLES = 5
failpoints.arm(sys.argv[3], "kill", 2)
fill(open_cache(CachePlace(Path(sys.argv[1]), "shards", sys.argv[2]), "text", "a"), KEYS[:11])
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["shard.joined", "shard.stored", "shard.cleared"])
def test_a_machine_that_vanishes_while_it_fills_leaves_nothing_wrong(
    moment: str, tmp_path: Path, url: str, server: str, launcher: Launcher
) -> None:
    words = [str(tmp_path / "a"), url, moment, str(Path(object_store.__file__).parent)]
    assert launcher.programs(FILL, words, environment=object_store.settings(server)).codes == [-9]
    shutil.rmtree(tmp_path / "a")
    other = opened(tmp_path / "b", url)
    assert len(fill(other)) in (len(KEYS) - 5, len(KEYS) - 10)
    require_all(other)
    content, _ = ObjectStore(f"{url}/text/a").read("index.parquet") or pytest.fail("no index")
    assert sorted(row.key for row in read_rows(content)) == sorted(KEYS)


def test_a_damaged_sample_is_never_used(tmp_path: Path, url: str) -> None:
    fill(opened(tmp_path / "a", url))
    row = opened(tmp_path / "b", url).index.samples.find(name_of(KEYS[3]))
    assert row is not None
    store = ObjectStore(f"{url}/text/a")
    content, tag = store.read(f"shards/{row.shard}.safetensors") or pytest.fail("no shard")
    store.replace(f"shards/{row.shard}.safetensors", content[: row.start] + b"?" + content[row.start + 1 :], tag)
    other = opened(tmp_path / "b", url)
    with pytest.raises(UserError, match=r"'prompt 3, ' .* is damaged .* noted in s3://.*/damaged/.*Restart"):
        other.load(KEYS[3])
    assert list(store.keys("damaged/")) == [f"damaged/{row.name}.{row.shard}"]
    again = opened(tmp_path / "c", url)
    assert fill(again) == [KEYS[3]]
    require_all(again)
    require_all(opened(tmp_path / "d", url))


@pytest.mark.slow
def test_what_is_damaged_on_this_machine_is_fetched_again(tmp_path: Path, url: str) -> None:
    fill(opened(tmp_path / "a", url))
    require_all(opened(tmp_path / "b", url))
    files = [path for path in (tmp_path / "b").glob("remote/*/part/text/a/*") if path.is_file()]
    assert len(files) == len(KEYS)
    for number, path in enumerate(files):
        content = path.read_bytes()
        path.write_bytes([b"", content[:-1], content[:-1] + bytes([content[-1] ^ 1])][number % 3])
    require_all(opened(tmp_path / "b", url))


def test_the_local_part_stays_within_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    part = LocalCopies(tmp_path / "part", 8000)
    for number in range(50):
        assert part.put(f"x/{number}", bytes([number]) * 500)
        assert part.get("x/0") == bytes(500), "what is used again and again stays"
        assert bytes_in(part.folder) <= 8000
    assert part.get("x/49") == bytes([49]) * 500 and part.get("x/3") is None and bytes_in(part.folder) > 4000
    assert not part.put("x/large", bytes(4000)) and "x/large" not in part
    again = LocalCopies(tmp_path / "part", 2000)
    again.put("x/new", bytes(100))
    assert bytes_in(again.folder) <= 2000 and "x/new" in again


def test_trimming_keeps_what_another_process_is_fetching(tmp_path: Path) -> None:
    writers = {f"{machine_name()}-{os.getpid()}", f"{machine_name()}-999999999", "0a1b2c-7", "0a1b2c-8"}
    for writer in writers:
        (tmp_path / f".shard.{writer}.part").write_bytes(bytes(500))
    os.utime(tmp_path / ".shard.0a1b2c-8.part", (0, 0))
    LocalCopies(tmp_path, 100).trim(0)
    left = {file.name.split(".")[2] for file in tmp_path.glob(".shard.*")}
    assert left == {f"{machine_name()}-{os.getpid()}", "0a1b2c-7"}, "of a living process; lately, of another machine"


@pytest.mark.slow
def test_a_local_part_smaller_than_the_data_is_enough(tmp_path: Path, url: str) -> None:
    fill(opened(tmp_path / "a", url))
    small = opened(tmp_path / "b", url, limit=1000)
    for _ in range(2):
        require_all(small)
        assert small.copies is not None and bytes_in(small.copies.folder) <= 1000


def test_threads_fetch_a_sample_once(tmp_path: Path, url: str, faults: Faults) -> None:
    fill(opened(tmp_path / "a", url))
    other = opened(tmp_path / "b", url)
    assert other.size_of(KEYS[0]) > 0 == other.size_of("unknown")
    faults.choose = lambda number, method, path: "slow"
    before = faults.seen
    threads = [threading.Thread(target=other.fetch, args=(KEYS[0],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert torch.equal(other.load(KEYS[0])["hidden"], sample(KEYS[0])["hidden"])
    for thread in threads:
        thread.join()
    assert faults.seen == before + 1


def test_a_web_server_is_read_and_never_written(tmp_path: Path) -> None:
    fill(open_cache(CachePlace(tmp_path / "shared", "shards"), "text", "a"))
    more = [*KEYS, "more"]
    with serving_ranges(tmp_path / "shared") as (web, requests):
        cache = opened(tmp_path / "here", web)
        assert fill(cache, keys=more) == ["more"]
        require_all(cache, keys=more)
        assert {method for method, _ in requests} == {"GET"}
        assert fill(opened(tmp_path / "here", web), keys=more) == []
        (tmp_path / "shared/text/a/index.parquet").unlink()
        with pytest.raises(UserError, match=r"has no index.parquet, and a web server cannot list shards"):
            opened(tmp_path / "there", web).load(KEYS[0])


@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_from_a_bucket_has_the_bits_of_one_from_a_folder(
    machines: int, tiny_config: dict, tmp_path: Path, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config["data"] |= {"variants": 2, "crop": "random"}
    tiny_config["train"] = {"steps": 8, "batch_size": 2}
    tiny_config["memory"]["modulation"] = "plan"
    folder = run_with(tiny_config, output={"cache": str(tmp_path / "folder"), "runs": str(tmp_path / "from-folder")})
    runs = []
    for number, fault in enumerate(("short", "error")[:machines]):
        (tmp_path / f"machine-{number}").mkdir()
        monkeypatch.chdir(tmp_path / f"machine-{number}")
        faults.choose = lambda number, method, path, fault=fault: fault if number % 4 == 0 else None
        with monkeypatch.context() as patch:
            if number == 1:  # a second machine encodes nothing
                patch.setattr(PromptEntries, "_encode", lambda *rest: pytest.fail("it encodes"))
            runs.append(run_with(tiny_config, output={"cache": url, "runs": "runs", "cache_local_gib": 0.001}))
        part = LocalCopies(next(Path(".cache/remote").glob("*/part")), 0)
        assert 0 < bytes_in(part.folder) <= 0.001 * GIB
    for run in runs:
        ours, theirs = ([row["loss"] for row in read_metrics(each)] for each in (run, folder))
        assert ours == theirs
        torch.testing.assert_close(saved_weights(run, 8), saved_weights(folder, 8), rtol=0, atol=0)
        assert all(row["waited"] >= 0 for row in read_metrics(run))
        summary = read_summary(run)
        assert summary is not None and summary["seconds_waited_per_step"] >= 0
    assert "waited" not in read_metrics(folder)[0]
