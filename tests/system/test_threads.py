"""How many threads compute, how they wait, and that a run keeps its number."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from simpletune.config.load import validate
from simpletune.runs.folder import read_chosen
from simpletune.system import threads
from simpletune.system.console import verbose
from simpletune.system.options import UserError
from simpletune.system.threads import ASKED, AUTO, WAITING, choose_threads, prepare_threads, usable_cores
from simpletune.training.train import train

ROOT = Path(__file__).resolve().parents[2]
TINY, MEDIUM = 3_774_016, 2_084_951_104


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nobody has set OMP_NUM_THREADS, with 8 cores."""
    monkeypatch.setenv(AUTO, "1")
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)


@pytest.mark.parametrize(
    ("parameters", "on_cpu", "count"),
    [(TINY, True, 1), (99_999_999, True, 1), (100_000_000, True, 2), (MEDIUM, True, 8), (TINY, False, 8)],
)
def test_the_rule(automatic: None, parameters: int, on_cpu: bool, count: int) -> None:
    assert choose_threads("auto", parameters, on_cpu)[0] == count


def test_what_is_asked_for_comes_first(automatic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads("auto", MEDIUM, True, kept=3)[0] == 3
    assert choose_threads(5, MEDIUM, True, kept=3) == (5, "speed.threads")
    monkeypatch.delenv(AUTO)
    monkeypatch.setenv(ASKED, "4")
    assert choose_threads("auto", TINY, True, kept=3) == (4, ASKED)
    assert choose_threads(5, TINY, True)[0] == 5


@pytest.mark.parametrize(("text", "count"), [("4,2", 4), (" 3 ", 3), ("2, 1,1", 2)])
def test_one_number_a_level_of_nesting_is_legal(text: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTO, raising=False)
    monkeypatch.setenv(ASKED, text)
    assert choose_threads("auto", TINY, True) == (count, ASKED)


@pytest.mark.parametrize("text", ["0", "abc", "", "-2", "4,0", "2.5", "4,", "²"])
def test_what_is_no_number_of_threads_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTO, raising=False)
    monkeypatch.setenv(ASKED, text)
    with pytest.raises(UserError, match=f"{ASKED}={text} is no number of threads. .*unset it"):
        choose_threads("auto", TINY, True)
    assert choose_threads(2, TINY, True)[0] == 2, "speed.threads comes first"


def test_the_environment_is_set_where_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ASKED, WAITING, AUTO):
        monkeypatch.setenv(name, "anything")  # so that the environment is restored afterwards
        monkeypatch.delenv(name)
    prepare_threads()
    assert (os.environ[WAITING], os.environ[ASKED], os.environ[AUTO]) == ("PASSIVE", str(usable_cores()), "1")
    prepare_threads()  # in a process started from this one
    assert os.environ[AUTO] == "1"
    monkeypatch.delenv(AUTO)
    monkeypatch.setenv(ASKED, "3")  # what the user has set stays
    monkeypatch.setenv(WAITING, "ACTIVE")
    prepare_threads()
    assert (os.environ[WAITING], os.environ[ASKED], AUTO in os.environ) == ("ACTIVE", "3", False)


@pytest.mark.parametrize(
    "words", ["-m simpletune generate --prompt x", "-m benchmarks speed", "inference/compare.py --checkpoints"]
)
def test_every_program_sets_it_before_torch(words: str, tmp_path: Path) -> None:
    """A torch that cannot be imported tells what the environment is when a program comes to it."""
    (tmp_path / "torch.py").write_text("import os\nraise SystemExit('waits ' + os.environ['OMP_WAIT_POLICY'])\n")
    environment = {key: value for key, value in os.environ.items() if key != WAITING}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    whole = [sys.executable, *words.split()]
    done = subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stderr.strip().endswith("waits PASSIVE"), done.stderr


def test_a_resumed_run_keeps_its_number(
    tiny_config: dict, automatic: None, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Wherever it goes on: here the rule would have given it 1 at the second start."""
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 1000)
    tiny_config["output"]["cache"] = str(tmp_path / "cache")  # what 8 threads encode has other last bits
    config = tiny_config | {"train": tiny_config["train"] | {"steps": 1}, "checkpoint": {"every": 1}}
    try:
        train(validate(config, "test"))
        assert read_chosen(validate(config, "test"))["threads"] == torch.get_num_threads() == 8
        monkeypatch.undo()
        monkeypatch.setenv(AUTO, "1")
        capsys.readouterr()
        with verbose():
            train(validate(config | {"train": config["train"] | {"steps": 2}}, "test"), resume="latest")
        assert torch.get_num_threads() == 8
        assert "threads 8 (auto: as at the run's first start)" in capsys.readouterr().out
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_a_busy_machine_costs_at_most_three_times_the_time(tmp_path: Path) -> None:
    """One process that computes for ever on each core; an idle machine gives the first figure."""
    busy = [sys.executable, "-c", "while True: pass"]
    idle = _seconds_of_demo(tmp_path / "idle")
    others = [subprocess.Popen(busy) for _ in range(usable_cores())]
    try:
        assert _seconds_of_demo(tmp_path / "busy") <= 3 * idle
    finally:
        for other in others:
            other.kill()
            other.wait()


def _seconds_of_demo(folder: Path) -> float:
    options = [f"output.{each}={folder}/{each}" for each in ("runs", "cache", "profiles")]
    environment = {key: value for key, value in os.environ.items() if key not in (ASKED, WAITING)}
    words = [sys.executable, "-m", "simpletune", "train", "demo", *options]
    began = time.perf_counter()
    subprocess.run(words, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, check=True)
    return time.perf_counter() - began
