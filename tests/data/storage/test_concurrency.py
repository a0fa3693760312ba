"""Two runs that share one cache at once: neither spoils it, nothing is made twice."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from failing_locks import fail_with
from launching import Launcher
from safetensors.torch import load_file

from simpletune.data.storage.cache import FileCache
from simpletune.system import locks
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header

ROOT = Path(__file__).resolve().parents[3]
# Both are loaded before either begins, and encoding is slow enough that they meet.
PROGRAM = """
import sys, time
from pathlib import Path
from simpletune.config.load import read_config
from simpletune.data.storage.cache import FileCache
from simpletune.models.shared.quantised_cache import QuantisedBase
from simpletune.training.train import train
made, save, write = [], FileCache.save, QuantisedBase.write
def slow(self, key, tensors):
    time.sleep(0.05)
    made.append(str(self.file(key)))
    save(self, key, tensors)
def slow_write(self, tensors):
    time.sleep(1)
    made.append(str(self.folder))
    return write(self, tensors)
config, ready, other = sys.argv[1:]
make = QuantisedBase.make
def make_when_both_lack_it(self, *rest):
    Path(ready + ".lacks").touch()
    while not Path(other + ".lacks").exists():
        time.sleep(0.005)
    return make(self, *rest)
FileCache.save, QuantisedBase.write, QuantisedBase.make = slow, slow_write, make_when_both_lack_it
Path(ready).touch()
while not Path(other).exists():
    time.sleep(0.005)
train(read_config(Path(config))[0])
print("\\n".join(f"made {file}" for file in made))
"""


def test_two_runs_on_one_cache_make_nothing_twice_and_train_alike(
    tmp_path: Path, tiny_pipeline: Path, tiny_images: Path, launcher: Launcher
) -> None:
    words = []
    for name, other in (("one", "two"), ("two", "one")):
        config = {
            "name": name, "device": "cpu", "model": {"pretrained": str(tiny_pipeline), "t5_length": 8},
            "data": {"path": str(tiny_images), "resolution": 32}, "adapter": {"rank": 2},
            "precision": {"weights": "int8"}, "train": {"steps": 2}, "memory": {"checkpointing": "none"},
            "validation": {"prompts": [], "loss_samples": 0}, "profile": {"max_traces": 0},
            "output": {each: str(tmp_path / each) for each in ("runs", "profiles", "cache")} | {"report": False},
        }  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        words.append([str(tmp_path / file) for file in (f"{name}.json", name, other)])
    outcome = launcher.programs(PROGRAM, *words)
    assert outcome.codes == [0, 0], outcome.said
    made = [file for text in outcome.said for file in re.findall(r"^made (.*)$", text, re.MULTILINE)]
    assert len(made) == len(set(made)) > 12
    kinds = [tmp_path / "cache" / kind for kind in ("latents", "prompts")]
    on_disk = [file for kind in kinds for file in kind.rglob("*") if file.is_file()]
    bases = list((tmp_path / "cache" / "quantised").iterdir())
    waited = [file for file in made if Path(file).parent.name in ("clip_l", "clip_g")]  # until they were joined
    assert len(waited) > 2 and not any(Path(file).exists() for file in waited)
    assert sorted(set(made).difference(waited)) == sorted(map(str, on_disk + bases)) and len(bases) == 1
    assert any("waiting for another run" in text for text in outcome.said)
    for file in on_disk:
        assert FileCache(file.parent).lacking([read_header(file)["__metadata__"]["key"]]) == []
    results = [load_file(tmp_path / "runs" / name / "pytorch_lora_weights.safetensors") for name in ("one", "two")]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_run_starts_while_a_page_looks_whether_it_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOOK", 30)
    run = tmp_path / "run"
    with locks.exclusive(run):
        assert locks.is_held(run)
    handle = os.open(tmp_path / ".run.lock", os.O_RDONLY)
    locks.lock_file(handle, shared=True)  # as is_held does for a moment
    timer = threading.Timer(0.1, os.close, [handle])
    timer.start()
    with locks.exclusive(run):
        timer.join()
        assert locks.is_held(run)


def test_where_no_lock_file_can_be_made_it_is_said_once_and_work_goes_on(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        with locks.wait_for_lock(tmp_path / "file" / "x.lock", "waiting"):
            pass
        with locks.exclusive(tmp_path / "file" / "run"):
            pass
    assert capsys.readouterr().out.count("file cannot be locked (") == 1


@pytest.mark.parametrize("number", locks.UNSUPPORTED, ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_said_once_and_work_goes_on(
    number: int, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with("flock", number, monkeypatch)
    for _ in range(2):
        with locks.exclusive(tmp_path / "run"), locks.wait_for_lock(tmp_path / "x.lock", "waiting"):
            pass
    warning = f"warning {tmp_path} is on a file system without locks. Do not let two runs share it\n"
    assert capsys.readouterr().out == warning


def test_any_other_error_of_a_lock_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with("flock", errno.EIO, monkeypatch)
    with pytest.raises(UserError, match="Input/output error"), locks.exclusive(tmp_path / "run"):
        pass


COUNT = """
import sys, time
from pathlib import Path
from simpletune.system.locks import wait_for_lock
counter = Path(sys.argv[1])
for _ in range(10):
    with wait_for_lock(counter.with_name("counter.lock"), "waiting"):
        number = int(counter.read_text())
        time.sleep(0.01)
        counter.write_text(str(number + 1))
"""
WAIT = """
import signal, sys
from pathlib import Path
from simpletune.system.locks import wait_for_lock
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a background job starts
with wait_for_lock(Path(sys.argv[1]), "waiting"):
    print("held", flush=True)
    sys.stdin.read()
"""


def start(code: str, file: Path) -> subprocess.Popen[str]:
    """A process of its own that runs some code with a file."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, str(file)], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def test_of_many_that_wait_one_at_a_time_is_let_in(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [start(COUNT, counter) for _ in range(3)]
    said = [process.communicate(timeout=60) for process in processes]
    assert counter.read_text() == "30", said


def test_a_killed_process_lets_the_next_one_in(tmp_path: Path) -> None:
    file = tmp_path / "x.lock"
    with start(WAIT, file) as first, start(WAIT, file) as second:
        assert first.stdout is not None and second.stdout is not None
        running = {first.stdout.readline(): first, second.stdout.readline(): second}
        assert sorted(running) == ["held\n", "waiting\n"]
        running["held\n"].kill()
        assert running["waiting\n"].communicate(timeout=120) == ("held\n", "")


def test_ctrl_c_ends_the_waiting(tmp_path: Path) -> None:
    file = tmp_path / "x.lock"
    with locks.wait_for_lock(file, "waiting"), start(WAIT, file) as process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in error and out == ""
