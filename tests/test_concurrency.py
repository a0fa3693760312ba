"""Two runs that share one cache at once: neither spoils it, nothing is made twice."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from simpletune.data.cache import Cache
from simpletune.system import locks

ROOT = Path(__file__).resolve().parent.parent
# Both are loaded before either begins, and encoding is slow enough that they meet.
PROGRAM = """
import sys, time
from pathlib import Path
from simpletune.config.load import read_config
from simpletune.data.cache import Cache
from simpletune.models.quantised_cache import QuantisedBase
from simpletune.training import loop as module
made, save, keep = [], Cache.save, QuantisedBase.keep
def slow(self, key, tensors):
    time.sleep(0.05)
    made.append(str(self.file(key)))
    save(self, key, tensors)
def slow_keep(self, model):
    time.sleep(0.5)
    made.append(str(self.folder))
    return keep(self, model)
Cache.save, QuantisedBase.keep = slow, slow_keep
config, ready, other = sys.argv[1:]
Path(ready).touch()
while not Path(other).exists():
    time.sleep(0.005)
module.train(read_config(Path(config))[0])
print("\\n".join(f"made {file}" for file in made))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_pipeline: Path, tiny_pictures: Path) -> tuple[Path, list[str]]:
    """Two runs started together on one empty cache; where, and what each said."""
    place = tmp_path_factory.mktemp("pair")
    processes = []
    for name, other in (("one", "two"), ("two", "one")):
        config = {
            "name": name, "device": "cpu", "model": {"pretrained": str(tiny_pipeline), "t5_length": 8},
            "data": {"path": str(tiny_pictures), "resolution": 32}, "adapter": {"rank": 2},
            "precision": {"weights": "int8"}, "train": {"steps": 2}, "memory": {"checkpointing": "none"},
            "validation": {"prompts": [], "eval_samples": 0}, "profile": {"max_traces": 0},
            "output": {"runs": str(place / "runs"), "profiles": str(place / "profiles"), "cache": str(place / "cache"),
                       "report": False},
        }  # fmt: skip
        (place / f"{name}.json").write_text(json.dumps(config))
        command = [sys.executable, "-c", PROGRAM, *(str(place / file) for file in (f"{name}.json", name, other))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return place, said


def test_nothing_is_made_twice(pair: tuple[Path, list[str]]) -> None:
    place, said = pair
    made = [file for text in said for file in re.findall(r"^made (.*)$", text, re.MULTILINE)]
    assert len(made) == len(set(made)) > 12
    on_disk = [file for kind in ("latents", "text") for file in (place / "cache" / kind).rglob("*") if file.is_file()]
    bases = list((place / "cache" / "quantised").iterdir())
    assert sorted(made) == sorted(map(str, on_disk + bases)) and len(bases) == 1
    assert any("waiting for another run" in text for text in said)


def test_what_they_share_is_whole_and_both_trained_alike(pair: tuple[Path, list[str]]) -> None:
    place, _ = pair
    for file in [
        *(place / "cache" / "latents").rglob("*.safetensors"),
        *(place / "cache" / "text").rglob("*.safetensors"),
    ]:
        from safetensors import safe_open

        with safe_open(file, "pt") as handle:
            key = handle.metadata()["key"]
        assert Cache(file.parent).lacking([key]) == []
    results = [load_file(place / "runs" / name / "pytorch_lora_weights.safetensors") for name in ("one", "two")]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_where_nothing_can_be_locked_it_is_said_once_and_work_goes_on(tmp_path: Path, capsys, monkeypatch) -> None:
    def fail(*words: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").touch()
    for _ in range(2):
        with locks.wait_for_lock(tmp_path / "file" / "x.lock", "waiting"):
            pass
    assert capsys.readouterr().out.count("file cannot be locked (") == 1
    monkeypatch.setattr(fcntl, "flock", fail)
    number = errno.ENOLCK
    with locks.exclusive(tmp_path / "run"):
        pass
    assert "is on a file system without locks: let no two runs share it" in capsys.readouterr().out
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"), locks.exclusive(tmp_path / "run"):
        pass
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with locks.exclusive(tmp_path / "elsewhere" / "run"):
        pass
    assert "elsewhere is on a file system without locks" in capsys.readouterr().out
