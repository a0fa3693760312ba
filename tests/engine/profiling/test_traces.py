"""Runs with the profiler on: what they leave, and that nothing that happens to it happens to them."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import run_with
from torch import nn

from simpletune.engine.profiling import summary
from simpletune.engine.profiling import traces as traces_module
from simpletune.engine.profiling.profile_option import Profile
from simpletune.engine.profiling.traces import EpochTraces, Facts
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.console import verbose
from simpletune.system.options import UserError
from simpletune.system.phases import phase
from simpletune.training.checkpointer import Checkpointer
from simpletune.training.validator import Validator


def warnings_of(run: Path) -> list[str]:
    return json.loads((run / "summary.json").read_text())["warnings"]


def traced(tmp_path: Path) -> dict[str, tuple[int, bool]]:
    """By epoch: steps of the summary, and whether there is a trace."""
    found = {}
    for folder in sorted((tmp_path / "profiles" / "tiny").glob("epoch-*")):
        steps = json.loads((folder / "summary.json").read_text())["steps"]
        found[folder.name] = steps, bool(list(folder.glob("*.pt.trace.json.gz")))
    return found


def profiling() -> bool:
    return torch.autograd._profiler_enabled()


@pytest.fixture(autouse=True)
def left_off() -> Iterator[None]:
    """Whatever a test does, the profiler is off after it."""
    yield
    assert not profiling()


# A loop of its own: a fraction of a second with as many epochs as one likes.

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def toy_step() -> None:
    with phase("data"):
        x = torch.ones(2, 4)
    with phase("forward"):
        loss = model(x).sum()
    with phase("backward"):
        loss.backward()


def toy_run(traces: EpochTraces, start: int = 0, at: Callable[[int], object] = lambda step: None) -> list[int]:
    """Steps in which the profiler was on."""
    seen = []
    with traces:
        for step in range(start, traces.steps):
            traces.before_step(step)
            if profiling():
                seen.append(step)
            toy_step()
            at(step)
            traces.after_step()
    return seen


def toy(tmp_path: Path, said: list[str], steps: int = 10, per_epoch: int = 5, **values: Any) -> EpochTraces:
    facts = values.pop("facts", Facts())
    return EpochTraces(Profile(**values), tmp_path / "profiles" / "tiny", steps, per_epoch, facts, said.append)


def test_one_window_an_epoch(tmp_path: Path) -> None:
    said: list[str] = []
    facts = Facts(flops=lambda step: 100.0 * step, blocks=model, interrupted=lambda step: step == 7)
    traces = toy(tmp_path, said, 13, facts=facts, blocks=True)
    assert toy_run(traces) == [2, 3, 6, 7, 11, 12] and said == []
    assert traced(tmp_path) == {f"epoch-00{n}": (2, True) for n in range(3)}
    recorded = [json.loads(file.read_text())["notes"][0] for file in traces.summaries]
    assert recorded == [f"recorded: steps {first} to {first + 1} of the run" for first in (3, 7, 12)]
    values = json.loads(traces.summaries[0].read_text())
    assert values["flops_per_step"] == 250.0  # steps 2 and 3: the first one that was seen is thrown away
    events = json.loads(gzip.open(traces.written[0]).read())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("block 1") == 2 and names.count("## backward ##") == 2
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_epochs_are_traced_and_it_is_said(steps: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    said: list[str] = []
    traces = toy(tmp_path, said, 2 * steps, steps)
    with verbose():
        traces.announce(0)
    shown = capsys.readouterr().out
    assert shown.count("profile a trace needs 3 consecutive steps") == (steps < 3)
    if steps < 3:
        warm = "after 1 of warm-up" if steps > 2 else "without warm-up"
        for words in (f"an epoch has {steps} ", f"records {steps} step{'s' * (steps > 1)} {warm}", "max_traces=0"):
            assert words in shown
    toy_run(traces)
    assert traced(tmp_path) == {f"epoch-00{n}": (min(steps, 2), True) for n in range(2)}
    assert capsys.readouterr().out == "" and said == []  # nothing in the middle of the progress


def test_what_stands_in_the_windows_way_is_said_of_a_resumed_run_too(tmp_path: Path, capsys) -> None:
    facts = Facts(interrupted=lambda step: step % 2 == 1)
    with verbose():
        toy(tmp_path, [], 20, 10, facts=facts).announce(4)
    assert "an epoch has 2 between validation and saving" in capsys.readouterr().out
    toy(tmp_path, [], 20, 10, facts=facts, max_traces=0).announce(0)
    toy(tmp_path, [], 20, 10).announce(20)  # nothing is left to do
    assert capsys.readouterr().out == ""


def test_a_resumed_run_traces_the_rest_of_its_epoch_once(tmp_path: Path) -> None:
    said: list[str] = []
    assert toy_run(toy(tmp_path, said, 20, 10), start=4) == [6, 7, 12, 13]
    assert traced(tmp_path) == {"epoch-000": (2, True), "epoch-001": (2, True)}
    assert toy_run(toy(tmp_path, said, 20, 10), start=4) == []  # both epochs have theirs
    assert toy_run(toy(tmp_path / "b", said, 20, 10), start=9)[:1] == [9]
    assert said == []


def test_a_loop_that_ends_early_leaves_what_was_recorded(tmp_path: Path) -> None:
    said: list[str] = []
    with toy(tmp_path, said) as traces:
        for step in range(3):
            traces.before_step(step)
            toy_step()
            traces.after_step()
    assert traced(tmp_path) == {"epoch-000": (1, True)} and said == []
    assert "- recorded: step 3 of the run\n" in traces.summaries[0].with_suffix(".md").read_text()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_window_is_closed_on_every_way_out(error: type[BaseException], step: int, tmp_path: Path) -> None:
    said: list[str] = []

    def leave(here: int) -> None:
        if here == step:
            assert profiling() == (step > 1)  # in warm-up it only gets ready
            raise error("out")

    with pytest.raises(error, match="out"):
        toy_run(toy(tmp_path, said, facts=Facts(blocks=model), blocks=True), at=leave)
    assert not profiling() and said == [] and not model[0]._forward_hooks
    assert not (tmp_path / "profiles").exists()
    toy_run(toy(tmp_path, said))  # and another run can have its own
    assert len(traced(tmp_path)) == 2


def fail(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (torch.profiler, "schedule"), (torch.profiler.profile, "start"), (torch.profiler.profile, "step"),
        (torch.profiler.profile, "stop"), (torch.profiler.profile, "export_chrome_trace"),
        (traces_module.Window, "events"), (traces_module, "name_ranges"), (traces_module, "pack"),
        (summary, "write_summary"), (summary, "summarise"), (Path, "mkdir"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_failure_is_said_once_and_is_the_end_of_tracing_only(
    place: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, fail)
    said: list[str] = []
    traces = toy(tmp_path, said, 15, facts=Facts(blocks=model), blocks=True)
    done: list[int] = []
    seen = toy_run(traces, at=done.append)
    assert done == list(range(15)) and max(seen, default=0) < 5
    (line,) = said
    assert line.startswith("the profiler failed and is off for the rest of the run (OSError: [Errno 28] No space")
    assert not profiling() and not model[0]._forward_hooks
    monkeypatch.undo()
    assert not list(tmp_path.rglob(".trace-*")) and not list(tmp_path.rglob("*.part"))
    if name == "pack":
        assert traced(tmp_path) == {"epoch-000": (2, False)}
        assert "the trace could not be written" in json.loads(traces.summaries[0].read_text())["notes"]


def test_a_profiler_that_is_on_already_is_no_end(tmp_path: Path) -> None:
    """A user's own profiler around the run: two at once are not possible."""
    said: list[str] = []
    with torch.autograd.profiler.profile() as outer:
        toy_run(toy(tmp_path, said))
    assert len(said) == 1 and "another profiler is active" in said[0]
    assert "## backward ##" in {event.name for event in outer.function_events or []}


def test_a_trace_that_is_too_large_is_dropped_and_its_summary_stays(tmp_path: Path) -> None:
    said: list[str] = []
    toy_run(toy(tmp_path, said, 15, max_mb=0.001))
    assert traced(tmp_path) == {f"epoch-00{n}": (2, False) for n in range(3)}
    (line,) = said
    assert "the trace of epoch-000 has 0.00" in line and "over profile.max_mb 0.001: it was dropped" in line
    assert "Use a smaller profile.active" in line
    assert line in json.loads((tmp_path / "profiles/tiny/epoch-000/summary.json").read_text())["notes"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread says so, too
def test_a_full_disk(tiny_config: dict, tmp_path: Path) -> None:
    """A real one: everything under profiles/ is on a file system of 64 KiB."""
    disk = tmp_path / "profiles"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs more rights")
    try:
        run = run_with(tiny_config, profile={"max_traces": 3}, train={"steps": 12})
        left = [file.name for file in disk.rglob("*.pt.trace*")]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert len(read_metrics(run)) == 12 and (run / "pytorch_lora_weights.safetensors").exists() and left == []
    assert sum(line.startswith("the profiler failed and is off") for line in warnings_of(run)) == 1


# Runs.


def test_a_run_leaves_a_trace_and_a_summary_an_epoch(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but steps is in a window, and losses are those of a run without profiles."""
    on: list[bool] = []
    for owner, name in ((Checkpointer, "save"), (Validator, "generate"), (Validator, "evaluate")):
        honest = getattr(owner, name)

        def watched(self: Any, step: int, honest: Callable = honest) -> Any:
            on.append(profiling())
            return honest(self, step)

        monkeypatch.setattr(owner, name, watched)
    changes = {"checkpoint": {"every": 5}, "validation": {"every": 3, "loss_samples": 2}, "train": {"steps": 12}}
    profile = {"max_traces": 5, "memory": True, "blocks": True, "record_shapes": True}
    run = run_with(tiny_config, **changes, profile=profile)
    assert len(on) > 8 and not any(on)
    assert traced(tmp_path) == {"epoch-000": (2, True), "epoch-001": (2, True)} and warnings_of(run) == []
    values = json.loads((tmp_path / "profiles/tiny/epoch-001/summary.json").read_text())
    assert {"data", "noise", "forward", "loss", "backward", "clip", "optimizer", "other"} == set(values["phases"])
    assert sum(values["phases"].values()) == pytest.approx(values["seconds_per_step"], rel=1e-6)
    assert 0 < values["idle"]["data"] < values["seconds_per_step"] and values["kernels"] == []
    assert values["flops_per_step"] > 1e6 and values["mfu"] is None
    assert "aten::mm" in [entry["name"] for entry in values["operators"]]
    memory = values["memory"]
    assert memory["peak_mib"] == max(point["total_mib"] for point in memory["timeline"]) > 0
    phases = {point["phase"] for point in memory["timeline"]}
    assert {"noise", "forward", "loss", "backward", "clip"} <= phases  # the fused update allocates nothing
    assert {"weights", "adapter", "gradients", "optimizer", "activations"} <= set().union(
        *(point["by_kind"] for point in memory["timeline"])
    )
    assert any(note.startswith("memory: measured") for note in values["notes"])
    plain = run_with(tiny_config, train={"steps": 12}, name="plain")
    assert [row["loss"] for row in read_metrics(plain)] == [row["loss"] for row in read_metrics(run)]


def raise_error() -> None:
    raise RuntimeError("in the middle")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        pytest.param(raise_error, RuntimeError, marks=pytest.mark.slow, id="exception"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt, id="SIGINT"),
        pytest.param(lambda: sys.exit(3), SystemExit, marks=pytest.mark.slow, id="sys.exit"),
    ],
)
def test_a_run_that_is_killed_in_a_window_goes_on_from_its_checkpoint(
    act: Callable[[], object], error: type[BaseException], tiny_config: dict, tmp_path: Path, monkeypatch: Any
) -> None:
    profile = {"max_traces": 1, "warmup": 0, "active": 2}
    changes = {"checkpoint": {"every": 2}, "train": {"steps": 6}, "profile": profile}
    honest, calls = TrainStep.loss, []

    def loss(self: TrainStep, model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 4:  # in the middle of a step
            assert profiling()
            act()
        return honest(self, model, batch)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
    try:
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(TrainStep, "loss", loss)
            run_with(tiny_config, **changes)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not profiling()
    run = run_with(tiny_config, "latest", **changes)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6] and warnings_of(run) == []
    assert traced(tmp_path) == {"epoch-000": (2, True)}


@pytest.mark.slow
def test_an_epoch_of_one_step(tiny_config: dict, tmp_path: Path) -> None:
    run = run_with(tiny_config, train={"steps": 3, "batch_size": 6}, profile={"max_traces": 2})
    assert traced(tmp_path) == {"epoch-000": (1, True), "epoch-002": (1, True)} and warnings_of(run) == []


@pytest.mark.parametrize(
    ("place", "words", "written"),
    [
        (
            "engine.profiling.traces.pack",
            "the profiler failed and is off for the rest of the run (OSError: [Errno 28]",
            False,
        ),
        ("estimate.simulate.simulate.snapshots_of_step", "", True),
    ],
    ids=["profiler", "prediction"],
)
def test_a_failure_is_in_the_runs_warnings_and_leaves_the_rest(
    place: str, words: str, written: bool, tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"simpletune.{place}", fail)
    (line,) = warnings_of(run_with(tiny_config, profile={"max_traces": 1}))
    assert words in line and traced(tmp_path) == {"epoch-000": (2, written)}


def test_a_loss_that_is_not_finite_stops_a_traced_run(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainStep.loss
    monkeypatch.setattr(TrainStep, "loss", lambda self, model, batch: honest(self, model, batch) * float("nan"))
    with pytest.raises(UserError, match="the loss is nan"):
        run_with(tiny_config, profile={"max_traces": 1, "wait": 0})


def test_with_no_traces_nothing_of_it_is_loaded(tiny_config: dict, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch_tb_profiler", None)  # as if it were not there
    monkeypatch.setattr(torch.profiler, "profile", fail)
    monkeypatch.setattr("simpletune.estimate.simulate.simulate.snapshots_of_step", raise_error)
    run = run_with(tiny_config, profile={"max_traces": 0})
    assert warnings_of(run) == [] and traced(tmp_path) == {}


@pytest.mark.slow
def test_steps_outside_of_windows_are_not_slower(tiny_config: dict, tmp_path: Path) -> None:
    """In pairs, on and off in turn: the median of each pair's ratio of median seconds a step. Windows are left out."""
    ratios = []
    for pair in range(8):
        seconds = {}
        for traces in (1, 0) if pair % 2 else (0, 1):
            changes = {"train": {"steps": 120}, "data": {"repeats": 20}, "tracking": {"tensorboard": False}}
            run = run_with(tiny_config, name=f"{pair}-{traces}", profile={"max_traces": traces}, **changes)
            rows = [row["seconds"] for row in read_metrics(run) if row["step"] > 10]
            seconds[traces] = statistics.median(rows)
        assert len(list((tmp_path / "profiles" / f"{pair}-1").glob("epoch-000/*.gz"))) == 1
        ratios.append(seconds[1] / seconds[0])
    print(f"\nseconds a step outside of the window, profiling on over off: {statistics.median(ratios):.3f}")
    print("  by pair:", " ".join(f"{ratio:.3f}" for ratio in ratios))
    assert statistics.median(ratios) < 1.25
