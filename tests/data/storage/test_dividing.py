"""Several processes that fill one cache: each encodes its share, nothing twice, and what was killed is made up."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from launching import Launcher, free_port

from simpletune.data.storage.cache import FileCache
from simpletune.data.storage.claims import PLACES, KeyRange, place_of
from simpletune.system import locks

KEYS = [f"prompt {number}" for number in range(60)]


def reference_owner(key: str, of: int) -> int:
    """The share of a key by its definition: the part of all hashes, cut into equal parts, that its hash lies in."""
    digest = int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")
    return digest * of >> 256


def fill(cache: FileCache, share: KeyRange, together: int, pause: float = 0.0) -> list[str]:
    """Encode what is lacking as the prepare stages do; the keys in the order of their files."""
    made = []
    for group in cache.claim(cache.lacking(KEYS, share), share, together):
        for key in group:
            time.sleep(pause)
            cache.save(key, {"x": torch.tensor([place_of(key)])})
            made.append(key)
    return made


class Child:
    """A forked process that fills a cache and writes down what it made."""

    def __init__(self, folder: Path, share: KeyRange, together: int = 4, pause: float = 0.01, gate: Path | None = None):
        self.file = folder.parent / f"made-{share.number}-{os.urandom(4).hex()}"
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                while gate is not None and len(list(gate.iterdir())) < 2:  # two begin together
                    (gate / str(os.getpid())).touch()
                    time.sleep(0.005)
                made = fill(FileCache(folder), share, together, pause)
                self.file.write_text(json.dumps([made, sorted(k for k in KEYS if k not in FileCache(folder))]))
                code = 0
            finally:
                os._exit(code)

    def end(self) -> tuple[list[str], list[str]]:
        """Wait; what it made, and what it still lacked when it was done."""
        assert os.waitpid(self.pid, 0)[1] == 0
        made, lacked = json.loads(self.file.read_text())
        return made, lacked


def test_the_share_of_a_key_is_its_part_of_all_hashes() -> None:
    for of in (1, 2, 3, 8):
        owners = {key: KeyRange(0, of).owner(key) for key in KEYS}
        assert owners == {key: reference_owner(key, of) for key in KEYS}
        assert set(owners.values()) == set(range(of))
    assert max(map(place_of, KEYS)) < PLACES


def test_a_process_alone_encodes_all_in_the_order_of_a_group(tmp_path: Path) -> None:
    assert fill(FileCache(tmp_path / "text" / "a"), KeyRange(), 512) == KEYS
    # Of machines that share no folder, each makes a whole cache.
    assert sorted(fill(FileCache(tmp_path / "text" / "b"), KeyRange(1, 4), 4)) == sorted(KEYS)


@pytest.mark.parametrize("locked", [True, False], ids=["locks", "no locks"])
def test_processes_divide_the_keys_and_all_see_them_at_the_end(
    locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locked:
        monkeypatch.setattr(locks, "lock_range", Mock(side_effect=OSError(37, "No locks available")))
    folder = tmp_path / "text" / "a"
    children = [Child(folder, KeyRange(number, 3)) for number in range(3)]
    made, lacked = zip(*(child.end() for child in children), strict=True)
    assert lacked == ([], [], [])
    every = [key for each in made for key in each]
    assert set(every) == set(KEYS) and (len(every) == len(KEYS) or not locked)
    for number, own in enumerate(made):  # each began with its own share
        assert {reference_owner(key, 3) for key in own[:4]} <= {number}, own
    assert all(int(FileCache(folder).load(key)["x"]) == place_of(key) for key in KEYS)


def test_processes_of_different_runs_divide_the_keys_too(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    children = [Child(tmp_path / "text" / "a", KeyRange(), gate=gate) for _ in range(2)]
    made = [child.end()[0] for child in children]
    assert sorted(made[0] + made[1]) == sorted(KEYS) and all(made)


def test_what_a_killed_process_had_claimed_is_encoded_by_the_one_that_waits(tmp_path: Path) -> None:
    folder = tmp_path / "text" / "a"
    slow = Child(folder, KeyRange(0, 2), together=30, pause=60)  # claims its share and writes nothing
    while not list(folder.parent.parent.glob(".locks/*")):
        time.sleep(0.01)
    other = Child(folder, KeyRange(1, 2))
    own = [key for key in KEYS if reference_owner(key, 2) == 1]
    late = time.monotonic() + 120
    while sum(key in FileCache(folder) for key in own) < len(own):
        assert time.monotonic() < late, "it waited although it had a share of its own to do"
        time.sleep(0.02)
    (folder / f".{FileCache(folder).file(KEYS[0]).name}.000000-1.part").write_bytes(
        b"what a killed process was writing"
    )
    os.kill(slow.pid, signal.SIGKILL)
    os.waitpid(slow.pid, 0)
    made, lacked = other.end()
    assert lacked == [] and sorted(made) == sorted(KEYS)
    assert fill(FileCache(folder), KeyRange(), 4) == []
    cache = FileCache(folder)
    cache.file(KEYS[3]).write_bytes(b"damaged")
    assert fill(FileCache(folder), KeyRange(), 4) == [KEYS[3]]
    assert not list(folder.glob(".*.part")), "left by the killed process"


def test_a_damaged_file_is_set_aside_by_one_process_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "text" / "a"
    fill(FileCache(folder), KeyRange(), 8)
    FileCache(folder).file(KEYS[5]).write_bytes(b"damaged")
    owner = reference_owner(KEYS[5], 2)
    assert FileCache(folder).lacking(KEYS, KeyRange(1 - owner, 2)) == [] and capsys.readouterr().out == ""
    assert FileCache(folder).lacking(KEYS, KeyRange(owner, 2)) == [KEYS[5]]
    assert "encoding it again" in capsys.readouterr().out


# A run of two processes; in the second, one picture cannot be read.
RANK = """
import os, sys, time
config, rank, port, bad = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from pathlib import Path
from simpletune.config.load import read_config
from simpletune.data.sources.source import UnusableImage
from simpletune.stages.latent_cache import LatentCache
from simpletune.training.train import train
whole, fill, made, rejected = LatentCache._encode_one, LatentCache.fill, [], Path(config).with_name("rejected")
def encode_one(self, view, vae, device):
    if rank == "1" and view.image.name == bad:
        rejected.touch()
        raise UnusableImage("cannot be read (only here)")
    made.append(view.image.name)
    return whole(self, view, vae, device)
def fill_later(self, *words):
    while rank == "0" and not rejected.exists():  # else it may encode the picture before the other comes to it
        time.sleep(0.01)
    return fill(self, *words)
LatentCache._encode_one, LatentCache.fill = encode_one, fill_later
train(read_config(Path(config))[0])
print("made", *sorted(made))
"""


def test_all_leave_out_what_one_process_rejects(
    launcher: Launcher, tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    config = tiny_config | {
        "name": "left-out", "train": {"steps": 2, "gradient_accumulation": 2},
        "validation": {"prompts": [], "loss_samples": 0},
        "data": tiny_config["data"] | {"on_error": "skip"}, "profile": {"max_traces": 0},
        "output": {name: str(tmp_path / name) for name in ("runs", "profiles", "cache")} | {"report": False},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = sorted(file.name for file in Path(config["data"]["path"]).glob("*.png"))
    with free_port() as port:
        words = [[str(tmp_path / "config.json"), str(rank), port, names[0]] for rank in (0, 1)]
        outcome = launcher.programs(RANK, *words)
    assert outcome.codes == [0, 0], outcome.said
    left = json.loads((tmp_path / "runs" / "left-out" / "data.json").read_text())
    assert [each["reason"] for each in left["left_out"]] == ["cannot be read (only here)"]
    assert names[0] not in json.dumps(left["samples"]) and names[1] in json.dumps(left["samples"])
    made = [set(re.search(r"^made ?(.*)$", said, re.MULTILINE)[1].split()) for said in outcome.said]  # type: ignore[index]
    assert not made[0] & made[1] and made[0] | made[1] >= set(names[1:])
