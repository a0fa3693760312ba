"""Processes that watch each other: what a lost, frozen or failed one means for the rest."""

# ruff: noqa: F811

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, Launcher, Outcome, free_port
from safetensors.torch import load_file
from two_processes import LEVERS, changed, ground, require_same, run_of, together, whole  # noqa: F401

from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.training.heartbeats import (
    APART,
    FAILED,
    LEFT,
    LOST,
    MEETING,
    MET,
    STOPPED,
    TRAINS,
    HealthCheck,
    Heartbeat,
    HeartbeatThread,
    Timeouts,
)

PATIENCE = Timeouts(beat=2, silent=24, absent=900, meeting=60, failed=10, stopped=60, stuck=1800)


def judged(*rounds: tuple[float, dict[int, Heartbeat | None]], own: int = MET) -> list[str | None]:
    """The verdicts after each round of signs: (seconds, sign of each process)."""
    judge, found = HealthCheck(PATIENCE, 0.0), []
    for now, signs in rounds:
        for number, sign in signs.items():
            judge.see(number, sign, now)
        verdict = judge.verdict(Heartbeat(1, 1, own), now)
        found.append(None if verdict is None else f"{verdict.grace:.0f} s: {verdict.why}")
    return found


def signs(*beats: int, stage: int = MET, **more: Any) -> list[dict[int, Heartbeat | None]]:
    return [{1: Heartbeat(beat, 9, stage, host="b", **more)} for beat in beats]


def test_heartbeats_are_read_as_they_were_sent() -> None:
    store = torch.distributed.HashStore()
    sender, reader = HeartbeatThread(), HeartbeatThread()
    sender.store = reader.store = store
    assert reader.read(sender.number) is None
    sent = sender.say(FAILED, "out of\tmemory\nat 0x1")
    assert sent == Heartbeat(1, sent.progress, sent.stage, FAILED, socket.gethostname(), "out of memory at 0x1")
    assert reader.read(sender.number) == sent


def test_a_process_is_lost_when_its_sign_no_longer_changes() -> None:
    times = [(0, 2, 25, 27), (0, 2, 25, 48)]
    lost, lives = signs(5, 6, 6, 6), signs(5, 6, 7, 8)
    said = "0 s: process 1 on b has sent no heartbeat for 25 s"
    assert judged(*zip(times[0], lost, strict=True)) == [None, None, None, said]
    assert judged(*zip(times[1], lives, strict=True)) == [None] * 4


def test_a_sign_that_never_changed_is_of_an_earlier_start() -> None:
    """A store may keep what a killed process wrote: it is neither lost nor failed, but not there yet."""
    for state in ("running", FAILED, LEFT):
        old = signs(5, 5, state=state)
        late = f"0 s: process 1 has not appeared for {901} s"
        assert judged(*zip((0, 800), old, strict=True)) == [None, None]
        assert judged((0, {1: None}), (901, old[0])) == [None, late]


def test_a_process_that_left_is_not_missed_and_one_that_failed_is_said() -> None:
    def after(state: str, reason: str = "") -> str | None:
        return judged((0, signs(5)[0]), (2, signs(6, state=state, reason=reason)[0]), (1000, {}))[2]

    assert after(LEFT) is None
    assert after(FAILED, "no room") == "10 s: process 1 on b has failed: no room"
    assert after(STOPPED, "SIGTERM") == "60 s: process 1 on b has stopped: SIGTERM"


@pytest.mark.parametrize("own, other, apart", [(APART, APART, True), (MET, APART, True), (MET, MET, False)])
def test_processes_that_do_not_meet(own: int, other: int, apart: bool) -> None:
    rounds = [(2.0 * n, signs(n, stage=other)[0]) for n in range(40)]
    found = judged(*rounds, own=own)
    assert (found[33], apart) == ("0 s: the processes have not met for 64 s" if apart else None, apart)
    assert not any(found[:32])
    assert not any(judged(*[(now, {1: None}) for now, _ in rounds], own=APART)), "it may start later"


def test_a_hang_of_all_is_found_once_training_has_begun() -> None:
    def rounds(stage: int, progress: int) -> list[tuple[float, dict[int, Heartbeat | None]]]:
        return [(20.0 * n, {1: Heartbeat(n, progress * n, stage)}) for n in range(100)]

    assert not any(judged(*rounds(MET, 0), own=MET)), "loading and compiling may take long"
    assert not any(judged(*rounds(TRAINS, 1), own=TRAINS))
    hang = judged(*rounds(TRAINS, 0), own=TRAINS)
    assert 90 < hang.index(next(filter(None, hang))) < 94 and "an exchange hangs" in str(hang[94])


def test_a_second_start_reads_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun serves one store for all starts; a stale address in it made processes hang."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**words, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    stores = []
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        store, number, of = next(iter(torch.distributed.rendezvous(MEETING, timeout=timedelta(seconds=10))))
        assert (number, of) == (1, 2)
        stores.append(store)
    stores[0].set("address", "of the killed process")
    assert stores[0].check(["address"]) and not stores[1].check(["address"])


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
from simpletune.apps.cli.main import main
from simpletune.system.options import UserError
from simpletune.stages.step.train_step import TrainStep
from simpletune.training import heartbeats
heartbeats.PATIENCE = heartbeats.Timeouts(beat=0.2, silent=3 if what == "frozen" else 20, meeting=30, failed=1, stuck=4)
step, steps = TrainStep.step, []
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
TrainStep.step = freeze
sys.exit(main(["train", config, "--resume", "auto"]))
"""


@pytest.mark.parametrize(
    "what", ["fails", *(pytest.param(what, marks=pytest.mark.slow) for what in ("frozen", "hangs"))]
)
def test_the_other_ends_by_itself_when_one_is_frozen_fails_or_hangs(
    launcher: Launcher,
    ground: dict[str, Any],
    tmp_path: Path,
    what: str,
) -> None:
    data = changed(ground, f"one-{what}")
    (tmp_path / "config.json").write_text(json.dumps(data))
    with free_port() as port:
        words = [[str(rank), port, str(tmp_path / "config.json"), what] for rank in (0, 1)]
        ended = launcher.programs(FROZEN, *words, limit=20 if what == "fails" else 3)
    said = {
        "frozen": "process 1 on {} has sent no heartbeat for 3 s",
        "fails": "process 1 on {} has failed: UserError: the disk of this machine is full",
        "hangs": "no process has done anything for 4 s",
    }[what].format(socket.gethostname())
    assert ended.codes == [LOST, {"frozen": -9, "fails": 6, "hangs": LOST}[what]], (ended.codes, ended.said)
    assert said in ended.said[0], ended.said[0]
    assert [row["step"] for row in read_metrics(run_of(data))][-1] >= 2
    assert [step for step, _ in checkpoint.list_checkpoints(run_of(data))] == [2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_starts_all_again_when_one_is_killed(
    whole: tuple[Path, list[str]],
    ground: dict[str, Any],
    tmp_path: Path,
) -> None:
    data = changed(ground, "torchrun")
    (tmp_path / "config.json").write_text(json.dumps(data))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    moment = "step.begun:4=kill"  # a second start takes only two steps
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
               "2", str(ROOT / "tests/support/failpoints.py"), moment, "train",
               str(tmp_path / "config.json"), "--resume", "auto"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume  from" in done.stdout and "step 2 of 4" in done.stdout
    require_same(run_of(data), whole[0])
    result = Path(data["output"]["runs"]) / "torchrun" / "pytorch_lora_weights.safetensors"
    assert load_file(result).keys() == load_file(whole[0] / result.name).keys()


# A run of two processes. Each prints what it maps; the second may be unable to.
MAPS = """
import os, re, sys, time
config, rank, port, what = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from simpletune.apps.cli.main import main
from simpletune.engine.memory.machine_weights import MachineWeights
from simpletune.stages.step.train_step import TrainStep
step, steps = TrainStep.step, []
def look(self, *words):
    steps.append(1)
    if len(steps) == 2:
        pattern = "(?m)^[0-9a-f-]+ rw-s.*memfd:simpletune.*\\n(?:[A-Z].*\\n)+"
        for found in re.findall(pattern, open("/proc/self/smaps").read()):
            print("mapped", found.split()[4], *re.findall("(?m)^(?:Rss|Pss): +([0-9]+)", found))
        print("in /dev/shm", len(os.listdir("/dev/shm")), flush=True)
        if what == "killed":
            # Both have left the first step's exchange: one killed within it would end the other by an error.
            open(f"{config}.{rank}", "w").close()
            while not os.path.exists(f"{config}.{1 - int(rank)}"):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
    return step(self, *words)
def fail(offer):
    raise PermissionError(13, "Permission denied", "/proc/1/fd/9")
TrainStep.step = look
if what == "refused":
    MachineWeights.join = fail
sys.exit(main(["train", config]))
"""


def mapping(launcher: Launcher, data: dict[str, Any], place: Path, what: str = "") -> Outcome:
    (place / "config.json").write_text(json.dumps(data))
    with free_port() as port:
        return launcher.programs(MAPS, *([str(place / "config.json"), str(rank), port, what] for rank in (0, 1)))


def test_two_processes_hold_one_copy_and_leave_nothing(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], tmp_path: Path
) -> None:
    data = changed(ground, "one-copy", memory=LEVERS)
    before = os.listdir("/dev/shm")
    outcome = mapping(launcher, data, tmp_path)
    assert outcome.codes == [0, 0], outcome.said
    mapped = [re.findall(r"^mapped (\d+) (\d+) (\d+)$", said, re.MULTILINE) for said in outcome.said]
    assert len(mapped[0]) == len(mapped[1]) == 1, outcome.said
    (first, rss, pss), (second, others, _) = mapped[0][0], mapped[1][0]
    assert first == second, "the same file"
    assert int(rss) >= int(others) > 0 and int(pss) <= 0.6 * int(rss), "each page counts half for each of two"
    assert all(f"in /dev/shm {len(before)}" in said for said in outcome.said)
    assert "GiB of frozen weights in host memory, once for all processes of a machine" in outcome.said[0]
    require_same(run_of(data), whole[0])


@pytest.mark.parametrize("what", ["refused", "killed"])
def test_a_process_that_cannot_share_and_processes_that_are_killed(
    what: str, launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], tmp_path: Path
) -> None:
    data = changed(ground, f"copy-{what}", memory=LEVERS)
    before = sorted(os.listdir("/dev/shm"))
    outcome = mapping(launcher, data, tmp_path, what)
    if what == "killed":
        assert outcome.codes == [-9, -9] and "mapped" in outcome.said[0]
    else:
        assert outcome.codes == [0, 0] and "mapped" in outcome.said[0] and "mapped" not in outcome.said[1]
        said = "warning 1 process has its own copy of the frozen weights in host memory, which takes as much memory"
        assert f"{said} again: [Errno 13] Permission denied: '/proc/1/fd/9'" in outcome.said[0]
        require_same(run_of(data), whole[0])
    assert sorted(os.listdir("/dev/shm")) == before
