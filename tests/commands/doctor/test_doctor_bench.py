"""simpletune doctor --bench: eight runs within their time, in a file that says nothing of the user and keeps what is
measured."""

from __future__ import annotations

import gc
import getpass
import json
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletune.apps.cli.main import main
from simpletune.commands.doctor import bench, bench_steps
from simpletune.commands.doctor.bench import COUNT, RUNS, CardFile, Run, measure_runs, read_card_file
from simpletune.commands.doctor.machine import Machine
from simpletune.commands.doctor.probe import ProbeProcess
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.system.disk import DiskFull
from simpletune.system.options import ConfigError, UserError

NAMES = list(RUNS)
T4 = {"name": "Tesla T4", "capability": [7, 5], "free": 14 * 2**30, "total": 15828320256}
ANSWERS = {
    "torch": {"version": "2.13.0", "cuda": "13.0", "devices": [T4]},
    "host": {"processor": "Intel(R) Xeon(R) CPU @ 2.00GHz", "core": 1.5e-4, "launch": 3e-6},
}
MEASURED = {
    "predicted_mib": 2653.1, "measured_mib": 2660.0, "predicted_seconds": 1.617, "seconds": 1.7, "steps": 10,
    "host": {"core": 1.5e-4, "launch": 3e-6, "to_device": 12.1, "to_host": 11.9}, "host_after": {"core": 2e-4},
}  # fmt: skip


class Child(ProbeProcess):
    """Answers each run as a test says, and notes its name, budget and the time that the parent gives it."""

    def __init__(self, runs: Callable[[str], dict[str, Any]], **answers: dict[str, Any]):
        super().__init__()
        self.runs, self.answers = runs, {**ANSWERS, **answers}
        self.asked: list[tuple[str, float, float]] = []

    def ask(self, question: str) -> dict[str, Any]:
        if question in self.answers:
            return self.answers[question]
        overrides, where, seconds = json.loads(question.removeprefix("bench "))
        name = next(name for name in NAMES if list(RUNS[name]) == overrides)
        assert where == "cuda"
        self.asked.append((name, seconds, self.seconds))
        return self.runs(name)


class Here(Machine):
    said: tuple[int, str] | None = (0, "580.65.06, Tesla T4\n580.65.06, Tesla T4")

    def command(self, *words: str) -> tuple[int, str] | None:
        return self.said


def machine(
    runs: Callable[[str], dict[str, Any]] = lambda name: MEASURED, said: Any = Here.said, **answers: dict[str, Any]
) -> Machine:
    found = Here(Child(runs, **answers), folders={}, system=("Linux", "6.8.0-generic"))
    found.said = said
    return found


def asked(on: Machine) -> list[str]:
    assert isinstance(on.probe, Child)
    return [name for name, _, _ in on.probe.asked]


def test_the_file_says_nothing_of_the_user_and_all_of_it_is_printed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"failed at {Path.home()}/photos/anna.png for {getpass.getuser()} on {socket.gethostname()}"

    def one(name: str) -> dict[str, Any]:
        return {"error": secret} if name == NAMES[1] else MEASURED

    printed: list[str] = []
    write = bench.write_json

    def shown_first(file: Path, value: dict[str, Any]) -> None:
        printed.append(capsys.readouterr().out)
        for run in value["runs"]:
            assert json.dumps(run) in "".join(printed)
        write(file, value)

    monkeypatch.setattr(bench, "write_json", shown_first)
    monkeypatch.chdir(tmp_path)
    assert measure_runs(machine(one), "cuda", None) == Path("t4-15gib.json")
    text = Path("t4-15gib.json").read_text()
    assert set(json.loads(text)) == {
        "version", "card", "capability", "memory_bytes", "driver", "cuda", "system", "core", "date", "versions", "runs",
    }  # fmt: skip
    for word in (str(Path.home()), "anna", socket.gethostname(), str(tmp_path), getpass.getuser() + " "):
        assert word not in text
    found = read_card_file(Path("t4-15gib.json"))
    assert (found.card, found.driver, found.capability) == ("Tesla T4", "580.65.06", [7, 5])
    assert [run.name for run in found.runs if run.left_out] == [NAMES[1]] and found.runs[1].left_out == "failed"
    head = json.loads("{" + printed[0].partition("{")[2])
    assert head == {**json.loads(text), "runs": []}


def test_eight_runs_are_measured_and_smaller_ones_stand_in_for_those_that_do_not_fit(tmp_path: Path) -> None:
    large = {NAMES[2]: {"predicted_mib": 9e4, "left_out": "does not fit"}, NAMES[5]: {"left_out": "not supported"}}
    on = machine(lambda name: large.get(name, MEASURED))
    runs = read_card_file(measure_runs(on, "cuda", tmp_path / "f.json")).runs
    assert [run.name for run in runs] == NAMES[: COUNT + 2]
    assert sum(run.seconds is not None for run in runs) == COUNT


def test_no_run_gets_more_than_its_time_or_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: clock[0])

    def hangs(name: str) -> dict[str, Any]:
        clock[0] += on.probe.seconds  # the parent then ends the child
        return {"error": "no answer"}

    def slow(name: str) -> dict[str, Any]:
        return hangs(name) if name != NAMES[0] else MEASURED

    on = machine(slow)
    runs = read_card_file(measure_runs(on, "cuda", tmp_path / "f.json")).runs
    assert clock[0] - 1000 <= bench.SECONDS <= 600
    assert isinstance(on.probe, Child)
    assert all(own < limit <= bench.RUN_SECONDS for _, own, limit in on.probe.asked)
    assert len(on.probe.asked) < len(NAMES) == len(runs), "those that time did not suffice for are named, too"
    assert {run.left_out for run in runs[1:]} == {"out of time"} and runs[0].seconds == 1.7


def test_what_is_measured_is_kept_and_a_second_call_takes_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "f.json"

    def stopped(name: str) -> dict[str, Any]:
        if name == NAMES[3]:
            raise KeyboardInterrupt
        return {"error": "killed"} if name == NAMES[1] else MEASURED

    with pytest.raises(KeyboardInterrupt):
        measure_runs(machine(stopped), "cuda", file)
    assert [run.name for run in read_card_file(file).runs] == NAMES[:3]
    on = machine()
    measure_runs(on, "cuda", file)
    assert asked(on) == [NAMES[1], *NAMES[3:COUNT]], "what failed is tried again, what was measured is not"
    with pytest.raises(UserError, match="is of another card or other versions. Name another file with --out"):
        measure_runs(machine(torch={**ANSWERS["torch"], "cuda": "12.8"}), "cuda", file)


def test_a_full_disk_leaves_the_runs_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = tmp_path / "f.json", bench.write_json

    def full(place: Path, value: dict[str, Any]) -> None:
        if len(value["runs"]) == 3:
            raise DiskFull("the disk is full")
        write(place, value)

    monkeypatch.setattr(bench, "write_json", full)
    with pytest.raises(DiskFull):
        measure_runs(machine(), "cuda", file)
    assert len(read_card_file(file).runs) == 2


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    on = machine(lambda name: {"error": "cuDNN is missing"})
    with pytest.raises(UserError, match=r"no run was measured: LoRA int8, 1024 px \(failed\).*simpletune doctor"):
        measure_runs(on, "cuda", tmp_path / "f.json")
    with pytest.raises(UserError, match="the process ended"):
        measure_runs(machine(torch={"error": "the process ended (killed by SIGSEGV)"}), "cuda", tmp_path / "f.json")


def test_without_a_card_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = machine(torch={**ANSWERS["torch"], "devices": []})
    with pytest.raises(UserError, match="torch finds no CUDA device; .*simpletune doctor --bench cpu"):
        measure_runs(on, "cuda", tmp_path / "f.json")
    assert not list(tmp_path.iterdir())
    for more in ("--json", "--no-train"):
        assert main(["doctor", "--bench", more]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a file of simpletune doctor --bench"),
        ("[]", "Input should be"),
        ('{"version": 2}', "version: Input should be 1"),
        (lambda text: text.replace('"card"', '"owner": "anna", "card"'), "owner: Extra inputs are not permitted"),
        (lambda text: text.replace("Tesla T4", "T4 | <img src=x>"), "card: String should match pattern"),
        (lambda text: text.replace("Tesla T4", "T4\\n# Title"), "card: String should match pattern"),
        (lambda text: text.replace('"steps": 10', '"steps": 10, "steps": 9'), "steps"),
        (lambda text: text.replace("1.7,", "NaN,"), "NaN"),
        (lambda text: text.replace("1.7,", "-1.7,"), "runs.0.seconds: Input should be greater than 0"),
        (lambda text: text + " " * bench.MAX_BYTES, "bytes"),
    ],
)  # fmt: skip
def test_a_broken_or_foreign_file_is_named(tmp_path: Path, text: Any, said: str) -> None:
    file = tmp_path / "theirs.json"
    measure_runs(machine(), "cuda", file)
    file.write_text(text if isinstance(text, str) else text(file.read_text()))
    with pytest.raises(UserError, match=r"theirs\.json: not a file of simpletune doctor --bench") as error:
        read_card_file(file)
    assert said in str(error.value)


def test_a_device_of_any_name_makes_a_file(tmp_path: Path) -> None:
    card = CardFile(version=1, card=bench.printable_name("Intel(R) Xeon® | “x”"), system="Linux", core=1e-4,
                    date="2026-11-27", versions={})  # fmt: skip
    assert card.file_name == "intel-r-xeon-x.json" and bench.printable_name("™") == "unknown"


@pytest.mark.parametrize("said", [(0, "[N/A], Tesla T4"), (9, "NVIDIA-SMI has failed"), None])
def test_a_driver_that_does_not_say_its_version_is_left_out(said: tuple[int, str] | None) -> None:
    assert bench.describe(machine(said=said), "cuda").driver is None


def test_every_run_is_configured_on_every_card() -> None:
    assert len(NAMES) > COUNT
    refused = []
    for name, overrides in RUNS.items():
        for capability in ((7, 5), (8, 9), None):
            try:
                assert bench_steps.run_config(overrides, capability).precision.compute != "auto"
            except ConfigError:
                refused.append((name, capability))
    assert refused == [("full bf16, 512 px", (7, 5))], "16-bit weights do not train in fp16"


@pytest.fixture
def minimal(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a card is of a smaller model."""
    smaller = (f"model.pretrained={tiny_pipeline}", "model.t5_length=8", "data.resolution=32")
    monkeypatch.setattr(bench_steps, "TINY", (*bench_steps.TINY, *smaller))


def test_a_run_takes_its_steps_and_stops_when_its_time_is_over(minimal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_steps, "MOST", 3)
    found = bench_steps.measure(RUNS["full bf16, 512 px"], "cpu", 60)
    assert found["steps"] == 3 and found["seconds"] > 0 and found["predicted_mib"] > 0
    named = {"predicted_mib", "seconds", "least", "steps", "host", "host_after"}
    assert set(found) == named, "a processor's peak is not measured"
    assert 0 < found["least"] <= found["seconds"] and set(found["host_after"]) == {"core"}
    assert Run(name="x", **found).host == HostSpeeds(**found["host"])
    assert bench_steps.measure(RUNS["LoRA int8, 512 px"], "cpu", 0)["steps"] == 1


def test_updates_in_the_backward_pass_leave_no_memory_to_the_next_run(minimal: None) -> None:
    config = bench_steps.run_config(RUNS["full bf16, 512 px"], None)
    with bench_steps.random_steps(config, torch.device("cpu")) as steps:
        steps.step()
        states = [value for state in steps.optimizer.state.values() for value in state.values()]
        tensors = {id(each): each for each in (*steps.model.parameters(), *states) if isinstance(each, torch.Tensor)}
        kept = [weakref.ref(each) for each in tensors.values()]
    del steps, states, tensors
    gc.collect()
    left = [each for reference in kept if (each := reference()) is not None]
    assert sum(each.nbytes for each in left) <= 2 * 1024, "the shared tables of quantiles"


@pytest.mark.slow
def test_the_form_runs_on_the_processor(tmp_path: Path) -> None:
    """In its child process, on the tiny model."""
    file = tmp_path / "f.json"
    assert main(["doctor", "--bench", "cpu", "--out", str(file)]) == 0
    found = read_card_file(file)
    assert found.capability is None and [run.name for run in found.runs] == NAMES[:COUNT]
    assert all(run.seconds and run.measured_mib is None for run in found.runs)


@pytest.mark.dry
def test_peaks_on_a_simulated_card_are_those_predicted_whatever_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    left = torch.cuda.memory_allocated() / 2**20  # by other tests of this process; the runs here add nothing to it
    for name in ("full bf16, 512 px", "LoRA int8, 512 px"):
        found = bench_steps.measure(RUNS[name], "cuda", 0)
        assert found["measured_mib"] - left == pytest.approx(found["predicted_mib"], rel=0.01), name
        assert found["steps"] == 1 and found["predicted_seconds"] > 0
    for total, why in ((2**31, "does not fit"), (22 * 2**30, "out of memory")):  # a busy card may have room later
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, total=total: (2**31, total))
        found = bench_steps.measure(RUNS["LoRA bf16, 1024 px"], "cuda", 0)
        assert found["left_out"] == why and "measured_mib" not in found
