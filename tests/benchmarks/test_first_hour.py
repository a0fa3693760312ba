"""The first hour on a card: every stage is tried, whatever became of the others, and each result is on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from benchmarks import first_hour, measured_memory, memory, memory_row, speed, speed_rows
from benchmarks.__main__ import parser as grids_parser
from benchmarks.first_hour import Stage
from benchmarks.table import Results, selected
from simpletune.apps.cli.main import parse
from simpletune.config.load import read_config
from simpletune.engine.memory.cuda_libraries import cublas_workspace
from simpletune.system.options import ConfigError, Problem, UserError

ROOT = Path(__file__).resolve().parents[2]


def stage(name: str, code: str, seconds: float = 200) -> Stage:
    return Stage(name, (sys.executable, "-c", textwrap.dedent(code)), seconds)


def stages_in(folder: Path) -> dict[str, dict]:
    return {each["name"]: each for each in json.loads((folder / "stages.json").read_text())["stages"]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_hour, "PATIENCE", 0.5)


def test_no_failure_ends_the_hour(tmp_path: Path) -> None:
    deaf = "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    stages = [
        stage("works", "print('one line')"),
        stage("fails", "import sys; print('why', file=sys.stderr); sys.exit(3)"),
        stage("hangs", deaf + f"subprocess.Popen(['sleep', '201.{os.getpid()}']); time.sleep(200)", 1),
        stage("is killed", "import os; os.kill(os.getpid(), 9)"),
        Stage("is not there", ("/no/such/program",), 200),
        stage("works too", "print('last')"),
    ]
    assert first_hour.run(stages, tmp_path, 5, "a card") == 1
    found = stages_in(tmp_path)
    outcomes = {name: each["outcome"] for name, each in found.items()}
    assert outcomes == {
        "works": "ok", "fails": "exit code 3", "hangs": "out of time", "is killed": "killed by SIGKILL",
        "is not there": "not started: No such file or directory", "works too": "ok",
    }  # fmt: skip
    assert 1 <= found["hangs"]["seconds"] < 200 and found["works"]["log"] == "logs/works.log"
    assert (tmp_path / "logs" / "fails.log").read_text().endswith("why\n")
    table = (tmp_path / "stages.md").read_text()
    assert re.search(r"\| fails \| .* \| exit code 3 \| .*logs/fails.log", table) and "a card" in table
    left = subprocess.run(["pgrep", "-f", f"sleep 201.{os.getpid()}"], capture_output=True, text=True)
    assert left.stdout == ""  # a stage's own children end with it


def test_what_is_done_is_not_repeated_and_what_failed_is(tmp_path: Path) -> None:
    count = "from pathlib import Path; file = Path({!r}); file.open('a').write('x')"
    good, bad = tmp_path / "good", tmp_path / "bad"
    stages = [
        stage("good", count.format(str(good))),
        stage("bad", count.format(str(bad)) + f"; assert len(file.read_text()) > 1, {good.name!r}"),
    ]
    assert first_hour.run(stages, tmp_path, 5) == 1
    assert first_hour.run(stages, tmp_path, 5) == 0
    assert (good.read_text(), bad.read_text()) == ("x", "xx")
    assert first_hour.run(stages, tmp_path, 5, again=True) == 0
    assert (good.read_text(), bad.read_text()) == ("xx", "xxx")


def test_the_hour_ends_in_time_and_says_what_was_not_begun(tmp_path: Path) -> None:
    began = time.monotonic()
    assert (
        first_hour.run([stage("long", "import time; time.sleep(200)"), stage("late", "print()")], tmp_path, 0.025) == 1
    )
    assert time.monotonic() - began < 200  # what the stage sleeps
    outcomes = {name: each["outcome"] for name, each in stages_in(tmp_path).items()}
    assert outcomes == {"long": "out of time", "late": "not started: no time left"}


def test_a_signal_ends_the_stage_and_the_hour_and_the_next_call_goes_on(tmp_path: Path) -> None:
    code = f"""
        import signal, sys
        from pathlib import Path
        from benchmarks import first_hour
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
        first_hour.PATIENCE = 0.5
        codes = {{"one": "", "two": "import time; time.sleep(200)", "three": ""}}
        stages = [first_hour.Stage(name, (sys.executable, "-c", code), 200) for name, code in codes.items()]
        sys.exit(first_hour.run(stages, Path({str(tmp_path)!r}), 5))
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment, stderr=subprocess.PIPE)
    patience = time.monotonic() + 200
    while not ((tmp_path / "stages.json").exists() and "two" in stages_in(tmp_path)):  # said before it has ended
        assert driver.poll() is None and time.monotonic() < patience
        time.sleep(0.05)
    assert stages_in(tmp_path)["two"]["outcome"] == "running"
    driver.send_signal(signal.SIGINT)
    _, error = driver.communicate(timeout=200)
    found = stages_in(tmp_path)
    assert {name: each["outcome"] for name, each in found.items()} == {"one": "ok", "two": "stopped"}, (
        driver.returncode,
        error,
    )
    assert driver.returncode
    with pytest.raises(ProcessLookupError):
        os.killpg(found["two"]["pid"], 0)
    assert first_hour.run([stage("one", "raise SystemExit(1)"), stage("two", "")], tmp_path, 5) == 0


# The order


def test_the_order_and_every_stage_s_command(tmp_path: Path) -> None:
    stages = first_hour.hour(tmp_path)
    names = [each.name for each in stages]
    order = ["doctor", "smoke", "smoke again", "memory targets", "tune kernels", "speed 1024 px", "full and streamed",
             "tests int8 and streaming", "tests", "memory", "speed"]  # fmt: skip
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    assert sum(each.seconds for each in stages if not each.fills) <= 30 * 60
    commands = {each.name: each.command for each in stages}
    assert "device=cuda" in commands["smoke"] and commands["smoke"] == commands["smoke again"]
    tests = commands["tests int8 and streaming"]
    assert "gpu" in tests and not any("maxfail" in word or word == "-x" for word in tests)
    for each in stages:
        assert each.command[:2] == (sys.executable, "-m")
        module, words = each.command[2], list(each.command[3:])
        if module == "simpletune":
            args = parse(words)
            if words[0] == "train" or "--calibrate" in words:
                read_config(args.config, args.overrides, needs_data=False)
        elif module == "benchmarks":
            assert grids_parser().parse_args(words).minutes * 60 < each.seconds, each.name  # ends by itself
            if "--rows" in words:
                rows = memory.ROWS if "memory" in words else speed_rows.grid()
                assert 1 <= len(selected(rows, words[words.index("--rows") + 1])) <= 8, each.name
        else:
            assert module == "pytest" and words[words.index("-m") + 1] == "gpu"


def test_a_dry_run_and_one_without_a_card_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = re.search(r"^gpu:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None and "benchmarks.first_hour" in recipe[1] and "pytest" not in recipe[1]
    assert first_hour.folder_of("NVIDIA GeForce RTX 4090").name == "gpu-rtx-4090"
    assert first_hour.folder_of("Tesla T4").name == "gpu-t4"
    monkeypatch.setattr(first_hour, "run", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(first_hour, "card_name", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert first_hour.main(["--dry-run", "--out", str(tmp_path / "new"), "--minutes", "30"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"smoke .*s  python -m simpletune train .*device=cuda", shown)
    assert shown.index("smoke") < shown.index("memory targets") < shown.index("-m pytest")
    assert first_hour.main([]) == 3 and "simpletune doctor" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


FAKE = """
import json, os, sys
for name, overrides in json.loads(sys.argv[1]):
    if name == "dies" or (name == "dies once" and not os.path.exists(name)):
        open(name, "w").close()
        os.kill(os.getpid(), 9)
    print("chatter of a library")
    print(json.dumps([name, {"measured_mib": 105, "reserved_mib": 120, "pid": os.getpid()}]), flush=True)
"""


def test_memory_is_measured_in_one_process_beside_stored_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {name: memory.Row((name,), 110) for name in ("a", "dies", "b", "dies once", "unpredicted")}
    monkeypatch.setattr(memory, "ROWS", {**rows, "job": memory.Row((), whole=True)})
    monkeypatch.setattr(measured_memory, "CHILD", (sys.executable, "-c", FAKE))
    stored = {name: {"predicted_mib": 100, "host_mib": 7, "at": "forward"} for name in ("a", "b", "dies", "dies once")}
    monkeypatch.setattr(measured_memory, "stored_predictions", lambda: stored)
    with pytest.raises(UserError, match="dies: killed by SIGKILL") as caught:
        measured_memory.run(tmp_path, 5)
    assert caught.value.code == 1
    found = Results(tmp_path / "memory", memory.COLUMNS).rows
    assert list(found) == ["a", "b", "unpredicted"] and "job" not in found
    assert found["a"]["error"] == pytest.approx(100 / 105 - 1, abs=1e-4) and found["a"]["target_mib"] == 110
    assert found["b"]["pid"] != found["a"]["pid"] and "predicted_mib" not in found["unpredicted"]
    with pytest.raises(UserError, match="dies"):
        measured_memory.run(tmp_path, 5)  # what died is tried again
    assert "dies once" in Results(tmp_path / "memory", memory.COLUMNS).rows
    assert "| a | 100 | 110 | 105 |" in (tmp_path / "memory.md").read_text()


def test_every_target_has_a_stored_prediction_and_another_card_s_workspace_is_added() -> None:
    stored = measured_memory.stored_predictions()
    assert {name for name, row in memory.ROWS.items() if row.target_mib and not row.whole} <= set(stored)
    here = measured_memory.predicted_for(stored["LoRA r16 int8, plan"], (9, 0))
    there = measured_memory.predicted_for(stored["LoRA r16 int8, plan"], memory.SM_89)
    more = (cublas_workspace((9, 0)) - cublas_workspace(memory.SM_89)) / 2**20
    assert here["predicted_mib"] - there["predicted_mib"] == pytest.approx(more, abs=1)


def test_rows_that_do_not_fit_say_so_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(overrides: tuple[str, ...]) -> dict:
        if overrides == ("large",):
            raise torch.OutOfMemoryError("no room")
        if overrides == ("full",):
            raise ConfigError([Problem("precision.weights", "needs bf16")])
        return {"measured_mib": 1}

    monkeypatch.setattr(memory_row, "measure", measure)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    measured_memory.child([["one", ["small"]], ["two", ["large"]], ["full", ["full"]], ["three", ["small"]]])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in found] == ["one", "two", "full", "three"]
    assert found[1][1]["at"] == "out of memory" and "measured_mib" not in found[1][1]
    assert found[2][1]["at"] == "not supported on this card"


def test_rows_on_a_t4_compute_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, which it lacks, torch would emulate products and choose another attention kernel."""
    for module in (memory, speed):
        assert module.config_of(memory.NF4, (7, 5)).precision.compute == "fp16"
        assert module.config_of(memory.NF4, (8, 9)).precision.compute == "bf16"
        with pytest.raises(ConfigError, match="updates are lost"):
            module.config_of(memory.FULL, (7, 5))
    monkeypatch.setattr(speed, "capability_of", lambda device: (7, 5))
    found = speed.measure("full", speed_rows.Row(memory.FULL), torch.device("cpu"), {})
    assert found == {"note": "not supported on this card"}
