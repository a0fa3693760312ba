"""Runs that are stopped by a signal, fail at a named moment, or are started over and over by one command."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import failpoints
import pytest
import torch
from accelerate import Accelerator
from slow_cases import slow_but
from tiny_runs import fail_at, run_with, saved_weights, stop_at

from simpletune.apps.cli import main as cli_main
from simpletune.runs import checkpoint
from simpletune.runs.folder import EVALUATIONS, read_metrics
from simpletune.system import atomic, signals
from simpletune.system.options import UserError
from simpletune.system.shell import quote_command
from simpletune.training.trainer import Trainer


def runs_of(tiny_config: dict) -> list[str]:
    names = (entry.name for entry in Path(tiny_config["output"]["runs"]).iterdir())
    return sorted(name for name in names if not name.endswith(".lock"))


def test_sigterm_finishes_the_step_and_one_command_continues_it(
    tiny_config: dict, write_config, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_with(tiny_config, name="whole", ema={"decay": 0.9})
    command = ["train", str(write_config(tiny_config)), 'ema={"decay": 0.9}', "--resume", "auto"]
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    failpoints.arm("step.begun", "term", 2)
    assert cli_main.main(command) == 143
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    said = capsys.readouterr()
    assert "saves after at most one step; a second one stops at once" in said.out and "step 2 of 4 is saved" in said.out
    assert f"stopped by SIGTERM. To continue: {quote_command('simpletune', 'train', command[1])} 'ema=" in said.err
    assert "Traceback" not in said.err
    assert cli_main.main(command) == 0 and "step 2 of 4" in capsys.readouterr().out
    run = whole.with_name("tiny")
    torch.testing.assert_close(saved_weights(run, 4), saved_weights(whole, 4), rtol=0, atol=0)
    assert [row["loss"] for row in read_metrics(run)] == [row["loss"] for row in read_metrics(whole)]
    assert cli_main.main(command) == 0
    assert "already finished (4 steps)" in capsys.readouterr().out
    assert runs_of(tiny_config) == ["tiny", "whole"]


def test_ctrl_c_in_the_last_step_leaves_the_result_to_the_next_start(tiny_config: dict) -> None:
    assert stop_at("step.begun", tiny_config, "int", count=4) == 130
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    assert checkpoint.list_checkpoints(run)[-1][0] == 4 and not (run / "summary.json").exists()
    run_with(tiny_config, "auto")
    assert (run / "summary.json").exists() and len(read_metrics(run)) == 4


def test_a_signal_while_drawing_saves_and_the_pictures_are_drawn_later(tiny_config: dict) -> None:
    looks = {"validation": {"prompts": ["a red disc"], "every": 2, "steps": 2, "loss_samples": 2}}
    assert stop_at("validation.evaluated", tiny_config, "term", count=2, **looks) == 143
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    assert [step for step, _ in checkpoint.list_checkpoints(run)] == [2]
    assert sorted(entry.name for entry in (run / "samples").iterdir()) == ["base"]
    run_with(tiny_config, "auto", **looks)
    assert sorted(f.name for f in (run / "samples").iterdir()) == ["base", "grid.png", "step-000002", "step-000004"]
    steps = [json.loads(line)["step"] for line in (run / EVALUATIONS).read_text().splitlines()]
    assert steps == [0, 2, 4]


def test_a_signal_while_preparing_stops_at_once_and_keeps_what_is_encoded(tiny_config: dict, tmp_path: Path) -> None:
    tiny_config["output"]["cache"] = str(tmp_path / "cache")
    assert stop_at("text.encoded", tiny_config, "term", count=3) == 143
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 3
    assert runs_of(tiny_config) == []


def test_the_second_signal_is_the_system_s(tiny_config: dict) -> None:
    handlers = []
    failpoints.arm("checkpoint.weights", lambda: handlers.append([signal.getsignal(n) for n in signals.SIGNALS]))
    stop_at("step.begun", tiny_config, "term")
    assert handlers == [[signal.SIG_DFL, signal.SIG_DFL]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_exception_still_stops_the_run(tiny_config: dict) -> None:
    class Untidy:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    def lose() -> None:
        Untidy()  # what its __del__ raises, Python prints and forgets

    failpoints.arm("data.scanned", lose)
    with pytest.raises(signals.Stopped), signals.handle_signals():
        run_with(tiny_config, "auto")


@pytest.mark.parametrize(
    "moment", slow_but(["checkpoint.before-rename"], ["step.begun", "metrics.appended", "checkpoint.before-rename"])
)
def test_runs_without_a_checkpoint_do_not_pile_up(moment: str, tiny_config: dict) -> None:
    looks = {"validation": {"prompts": ["a red disc"], "steps": 1, "loss_samples": 1}}
    for _ in range(2):
        fail_at(moment, tiny_config, **looks)
    run = run_with(tiny_config, "auto", **looks)
    assert runs_of(tiny_config) == ["tiny"] and len(read_metrics(run)) == 4
    assert not list(run.rglob("*.part"))


def test_what_someone_else_wrote_is_moved_aside_not_removed(tiny_config: dict) -> None:
    fail_at("step.begun", tiny_config, count=2)
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    (run / "notes.txt").write_text("mine")
    run_with(tiny_config, "auto")
    assert (run.with_name("tiny.1") / "notes.txt").read_text() == "mine"


FINISH = ["finish.saved", "finish.exported", "finish.summary", "finish.reported"]


@pytest.mark.parametrize("moment", slow_but(["finish.saved", "finish.summary"], FINISH))
def test_a_run_that_died_after_its_last_step_is_finished(moment: str, tiny_config: dict) -> None:
    fail_at(moment, tiny_config)
    run = run_with(tiny_config, "latest" if moment == "finish.exported" else "auto")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["complete"] and (run / "README.md").exists()
    assert summary["seconds_per_step"] > 0 and Path(summary["output"]).exists()


def test_auto_refuses_another_run_of_the_name(tiny_config: dict) -> None:
    run_with(tiny_config, train={"steps": 2})
    for steps in (2, 3):  # finished, and to be continued
        with pytest.raises(UserError, match="adapter.rank: 2 -> 3"):
            run_with(tiny_config, "auto", train={"steps": steps}, adapter={"rank": 3})
    assert runs_of(tiny_config) == ["tiny"]


def test_going_back_to_an_older_checkpoint_puts_later_ones_out_of_the_way(tiny_config: dict) -> None:
    saved = {"checkpoint": {"every": 2, "keep_last": 3}, "train": {"steps": 6}}
    run = run_with(tiny_config, **saved)
    failpoints.arm("step.begun", "raise", 2)
    with pytest.raises(failpoints.InjectedError):
        run_with(tiny_config, str(checkpoint.checkpoint_folder(run, 2)), **saved)
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == [
        "step-000002", "step-000004.superseded", "step-000006.superseded",
    ]  # fmt: skip
    run_with(tiny_config, "latest", **saved)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]


def test_an_older_run_and_its_traces_move_together_even_when_killed_between(tiny_config: dict) -> None:
    tiny_config["train"]["steps"] = 1
    for _ in range(2):
        run_with(tiny_config)
    failpoints.arm("run.moved-traces", "raise")
    with pytest.raises(failpoints.InjectedError):
        run_with(tiny_config)
    run_with(tiny_config)
    profiles = Path(tiny_config["output"]["profiles"])
    assert runs_of(tiny_config) == sorted(e.name for e in profiles.iterdir()) == ["tiny", "tiny.1", "tiny.2"]
    failpoints.arm("run.moved-traces", "raise")
    with pytest.raises(failpoints.InjectedError):
        run_with(tiny_config)
    run_with(tiny_config, "latest", train={"steps": 2})  # continued after all: it has traces again
    run_with(tiny_config)
    assert runs_of(tiny_config) == ["tiny", "tiny.1", "tiny.2", "tiny.4"] and (profiles / "tiny.4").is_dir()


def test_a_folder_that_cannot_be_renamed_leaves_the_older_one(tmp_path: Path, monkeypatch) -> None:
    folder, replace = tmp_path / "checkpoint", os.replace
    with atomic.atomic_folder(folder) as part:
        (part / "weights").write_text("old")

    def fails(source: Path, target: Path) -> None:
        if (Path(source) / "weights").is_file() and (Path(source) / "weights").read_text() == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError), atomic.atomic_folder(folder) as part:
        (part / "weights").write_text("new")
    assert (folder / "weights").read_text() == "old" and list(tmp_path.iterdir()) == [folder]


def test_processes_that_write_the_same_json_have_a_file_each_until_it_is_whole(tmp_path: Path, monkeypatch) -> None:
    """Predictions in the cache are written by every process that makes them."""
    seen: list[str] = []
    monkeypatch.setattr(atomic, "flush_to_disk", lambda path: seen.append(path.name))
    for number in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        atomic.write_json(tmp_path / "peaks.json", {"a": number}, shared=True)
    assert len(set(seen)) == 2 and json.loads((tmp_path / "peaks.json").read_text()) == {"a": 2}


def test_left_over_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    mine = atomic.temporary_path(target, shared=True)
    here, young, old = (
        mine.with_name(f".x.safetensors.{name}.part")
        for name in (f"{atomic.machine_name()}-{2**22 + 1}", "abcdef-1", "abcdef-2")
    )
    for file in (mine, here, young, old):
        file.write_text("half")
    os.utime(old, (0, time.time() - atomic.STALE - 60))
    atomic.remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, young])


@pytest.mark.parametrize(
    ("others", "expected", "unread"),
    [
        ([0.0, 0.0], [None] * 4, [1, 1, 1, 0]),
        ([0.5, 0.0], [None, None, signal.SIGTERM], [1, 1, 0]),
        ([0.0, 0.5], [None] * 4, [1, 1, 0, 0]),  # a request: all read every step before it is answered
    ],
)
def test_several_processes_stop_at_the_same_step(
    others: list[float], expected: list, unread: list[int], tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all processes were asked is reduced with their losses, and read with these: a step later."""
    sent, seen, left = [], [], []

    def reduce(self: Accelerator, mine: torch.Tensor, how: str) -> torch.Tensor:
        if how == "sum":  # whether one was asked after its last step
            return mine
        sent.append(mine)
        return mine + torch.tensor([0.0, *(others if len(sent) == 2 else [0.0, 0.0])])

    honest = Trainer._log

    def log(self: Trainer, *more: object, **named: bool) -> int | None:
        seen.append(honest(self, *more, **named))
        left.append(len(self.metrics._pending))
        return seen[-1]

    monkeypatch.setattr(Trainer, "_log", log)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    tiny_config["train"]["gradient_accumulation"] = 2
    monkeypatch.setattr(Accelerator, "reduce", reduce)
    with nullcontext() if expected[-1] is None else pytest.raises(signals.Stopped):
        run_with(tiny_config)
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    assert seen == expected and left == unread
    assert [row["step"] for row in read_metrics(run)] == list(range(1, len(seen) + 1))
    assert checkpoint.list_checkpoints(run)[-1][0] == len(seen)


def test_every_moment_has_its_place_in_the_code_until_disarmed() -> None:
    failpoints.install_all()
    functions = list(failpoints.changed)
    moments = [name for function in functions for name in function.__code__.co_consts if name in failpoints.NAMES]
    assert sorted(moments) == sorted(failpoints.NAMES)
    failpoints.disarm()
    left = [name for function in functions for name in function.__code__.co_consts if name in failpoints.NAMES]
    assert not left and not failpoints.changed


def test_a_moment_whose_statement_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = failpoints.NAMES["checkpoint.begun"]._replace(at="before data = ")
    monkeypatch.setitem(failpoints.NAMES, "checkpoint.begun", gone)
    failpoints.with_moments.cache_clear()
    with pytest.raises(LookupError, match="checkpoint.begun: 0 statements start with 'data = '"):
        failpoints.arm("checkpoint.weights")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step.begun", "is not NAME"),
        ("step.begun:x=kill", "is not NAME"),
        ("step.gone=kill", "unknown failpoint step.gone"),
        ("step.begun=explode", "unknown failpoint action explode. Use one of kill"),
    ],
)
def test_a_failpoint_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        failpoints.arm_all(text)
