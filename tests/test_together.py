"""Processes that watch each other: what a lost, frozen or failed one means for the rest."""

# ruff: noqa: F811

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, Launcher
from safetensors.torch import load_file
from test_processes import changed, ground, require_same, run_of, together, whole  # noqa: F401

from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.training.together import FAILED, LEFT, LOST, STOPPED, Judge, Patience, Sign

PATIENCE = Patience(beat=2, silent=24, failed=10, stopped=60, stuck=1800)


def judged(*rounds: tuple[float, dict[int, Sign | None]], own: Sign | None = None) -> list[str | None]:
    """The verdicts after each round of signs: (seconds, sign of each process)."""
    judge, found = Judge(PATIENCE, 0.0), []
    for now, signs in rounds:
        for number, sign in signs.items():
            judge.see(number, sign, now)
        verdict = judge.verdict(own or Sign(1, 1, False), now)
        found.append(None if verdict is None else f"{verdict.grace:.0f} s: {verdict.why}")
    return found


def test_signs_are_read_as_they_were_written() -> None:
    sign = Sign(3, 7, True, FAILED, "node-1", "out of memory")
    assert Sign.unpacked(sign.packed().encode()) == sign


def test_a_process_is_lost_when_its_sign_no_longer_changes() -> None:
    same = Sign(5, 9, False, host="b")
    assert judged((0, {1: same}), (23, {1: same}), (24.5, {1: same})) == [
        None, None, "0 s: process 1 on b has given no sign of life for 24 s"
    ]  # fmt: skip
    assert judged((0, {1: same}), (23, {1: same._replace(beat=6)}), (46, {1: same._replace(beat=6)})) == [None] * 3
    assert judged((10, {1: None}), (24.5, {1: None}))[1] == "0 s: process 1 has given no sign of life for 24 s"


def test_a_process_that_left_is_not_missed_and_one_that_failed_is_said() -> None:
    left = Sign(5, 9, True, LEFT)
    assert judged((0, {1: left}), (1000, {1: left})) == [None, None]
    failed, stopped = Sign(5, 9, True, FAILED, "b", "no room"), Sign(5, 9, True, STOPPED, "b", "SIGTERM")
    assert judged((0, {1: failed})) == ["10 s: process 1 on b has failed: no room"]
    assert judged((0, {1: stopped})) == ["60 s: process 1 on b has stopped: SIGTERM"]


def test_a_hang_of_all_is_found_once_training_has_begun() -> None:
    def rounds(trains: bool, progress: int) -> list[tuple[float, dict[int, Sign | None]]]:
        return [(20.0 * n, {1: Sign(n, progress * n, trains)}) for n in range(100)]

    assert set(judged(*rounds(trains=False, progress=0))) == {None}, "loading and compiling may take long"
    own = Sign(1, 1, True)
    assert set(judged(*rounds(trains=True, progress=1), own=own)) == {None}
    hang = judged(*rounds(trains=True, progress=0), own=own)
    assert hang.index(next(filter(None, hang))) == 91 and "an exchange hangs" in str(hang[91])


def test_the_other_ends_by_itself_when_one_is_killed(
    launcher: Launcher,
    whole: tuple[Path, list[str]],
    ground: dict[str, Any],
) -> None:
    """No launcher ends it: the survivor says why and ends with the code that means: start again."""
    data = changed(ground, "one-killed")
    first = launcher.train(data, data, moments={1: "step.begun:4=kill"}, alone=True)
    assert first.codes == [LOST, -9] and max(first.after) < 30, (first.codes, first.after, first.said)
    assert "Start all processes again with --resume auto" in first.said[0] and "Traceback" not in first.said[0]
    assert [step for step, _ in checkpoint.list_checkpoints(run_of(data))] == [2]
    together(launcher, data, resume="auto")
    require_same(run_of(data), whole[0])


FROZEN = """
import os, signal, sys
rank, port, config, what = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from simpletune.cli.main import main
from simpletune.options import UserError
from simpletune.step.core import StepCore
from simpletune.training import together
together.PATIENCE = together.Patience(beat=0.2, silent=3, failed=1, stuck=4)
step, steps = StepCore.step, []
def freeze(self, *words):
    steps.append(1)
    if rank == "1" and len(steps) == 4:
        if what == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "fails":
            raise UserError("the disk of this machine is full", code=6)
        import time
        time.sleep(600)
    return step(self, *words)
StepCore.step = freeze
sys.exit(main(["train", config, "--resume", "auto"]))
"""


@pytest.mark.parametrize("what", ["frozen", "fails", pytest.param("hangs", marks=pytest.mark.slow)])
def test_the_other_ends_by_itself_when_one_is_frozen_fails_or_hangs(
    launcher: Launcher,
    ground: dict[str, Any],
    tmp_path: Path,
    what: str,
) -> None:
    data = changed(ground, f"one-{what}")
    (tmp_path / "config.json").write_text(json.dumps(data))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [[str(rank), port, str(tmp_path / "config.json"), what] for rank in (0, 1)]
    ended = launcher.programs(FROZEN, *words, limit=3)
    said = {
        "frozen": "process 1 on {} has given no sign of life for 3 s",
        "fails": "process 1 on {} has failed: UserError: the disk of this machine is full",
        "hangs": "no process has done anything for 4 s",
    }[what].format(socket.gethostname())
    assert ended.codes == [LOST, {"frozen": -9, "fails": 6, "hangs": LOST}[what]], (ended.codes, ended.said)
    assert said in ended.said[0], ended.said[0]
    assert [row["step"] for row in read_metrics(run_of(data))][-1] >= 2
    assert [step for step, _ in checkpoint.list_checkpoints(run_of(data))] == [2]


@pytest.mark.slow
def test_torchrun_starts_all_again_when_one_is_killed(
    whole: tuple[Path, list[str]],
    ground: dict[str, Any],
    tmp_path: Path,
) -> None:
    data = changed(ground, "torchrun")
    (tmp_path / "config.json").write_text(json.dumps(data))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"SIMPLETUNE_FAILPOINT": "step.begun:4=kill"}  # a second start takes only two steps
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
               "2", "-m", "simpletune", "train", str(tmp_path / "config.json"), "--resume", "auto"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume  from" in done.stdout and "step 2 of 4" in done.stdout
    require_same(run_of(data), whole[0])
    result = Path(data["output"]["runs"]) / "torchrun" / "pytorch_lora_weights.safetensors"
    assert load_file(result).keys() == load_file(whole[0] / result.name).keys()
