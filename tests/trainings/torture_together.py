"""Kill one or all processes of runs of one, two and four over and over, even while they prepare together.

Each start of a run draws its number of processes. Survivors must end by themselves within 30 s, nothing may be lost,
and the end must equal, bit for bit, that of a run of two that was never killed. Before that, torchrun starts runs of
two, of which a process is stopped (SIGSTOP) or sleeps while the other waits in a collective, or of which torchrun
itself is killed. ``make torture-together`` does all of it; ``tests/trainings/test_together.py`` a few kills.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from launching import ROOT, Launcher
from two_processes import changed, require_same, run_of

from benchmarks.tiny_models import tiny_sd3
from simpletune.data.demo import demo_scenes
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.training.heartbeats import LOST

STEPS, EVERY, MOST = 4, 2, 30.0
PREPARING = (
    "data.scanned", "class.drawn", "text.encoded", "latents.encoded", "file.before-rename", "file.after-rename",
)  # fmt: skip
TRAINING = (
    "model.loaded", "step.begun", "step.updated", "metrics.appended", "checkpoint.begun", "checkpoint.before-rename",
    "checkpoint.after-rename", "validation.evaluated", "validation.picture",
)  # fmt: skip
OF_THE_FIRST = ("metrics.appended", "checkpoint.", "validation.")  # moments that only process 0 passes
PROCESSES = (1, 2, 4)
WHO = ("the first", "another", "all")


@dataclass
class Tally:
    """What was done so far."""

    kills: Counter[str] = field(default_factory=Counter)
    processes: Counter[int] = field(default_factory=Counter)
    preparing: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    repeated: int = 0
    runs: int = 0

    def lines(self) -> list[str]:
        """In words."""
        who = ", ".join(f"{name} {count}" for name, count in self.kills.items())
        moments = ", ".join(f"{name} {count}" for name, count in self.moments.most_common())
        return [
            f"kills survived            {self.kills.total()} ({who}), {self.preparing} of them while preparing",
            f"in runs of                {', '.join(f'{of}: {count}' for of, count in sorted(self.processes.items()))}",
            f"moments                   {moments}",
            f"runs ended like unkilled  {self.runs}: weights, optimizer, average and losses, bit for bit",
            f"survivors' exit codes     {dict(self.codes)}",
            f"slowest end of a survivor {self.slowest:.1f} s after the kill",
            f"most steps done again     {self.repeated}",
        ]


def ground(folder: Path) -> dict[str, Any]:
    """The configuration of a run with a model of two blocks, and its files."""
    tiny_sd3.build(folder / "pipeline", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=1, dtype="fp32")
    demo_scenes.write_folder(
        folder / "pictures", demo_scenes.sample_scenes(13, seed=3, style="flat"), seed=3, pixels=32
    )
    return {
        "name": "x", "device": "cpu", "model": {"pretrained": str(folder / "pipeline"), "t5_length": 8},
        "data": {"path": str(folder / "pictures"), "resolution": 32, "caption_dropout": 0.3},
        "memory": {"resident_blocks": 1}, "prior": {"method": "class_pictures", "prompt": "x", "count": 5, "steps": 1},
        "adapter": {"rank": 2}, "precision": {"weights": "fp32"}, "optimizer": {"lr": 0.01},
        "train": {"steps": STEPS, "gradient_accumulation": 4, "reduce": "exact"}, "ema": {"decay": 0.9},
        "checkpoint": {"every": EVERY},
        "validation": {"prompts": ["a red disc"], "steps": 1, "loss_samples": 2}, "profile": {"max_traces": 0},
        "output": {name: str(folder / name) for name in ("runs", "profiles", "cache")} | {"report": False},
    }  # fmt: skip


class Torture:
    """Kill runs.

    Args:
        launcher: starts the processes.
        folder: where to.
        seed: draws who is killed, and when.
    """

    def __init__(self, launcher: Launcher, folder: Path, seed: int):
        self.launcher, self.random, self.tally = launcher, random.Random(seed), Tally()
        self.data = ground(folder)
        self.reference = changed(self.data, "reference")
        began = time.monotonic()
        outcome = launcher.train(self.reference, self.reference)
        assert outcome.codes == [0, 0], outcome.said
        assert "once for all processes of a machine" in outcome.said[0], "streamed weights are shared"
        self.seconds = time.monotonic() - began

    def case(self, number: int, kills: int) -> None:
        """One run from an empty cache, killed so many times, and then left in peace."""
        shutil.rmtree(self.data["output"]["cache"])
        data = changed(self.data, f"case-{number}")
        turn = 0
        while turn < kills and self.kill(data, preparing=turn < 2):
            turn += 1
        outcome = self.launcher.train(*[data] * self.random.choice(PROCESSES), resume="auto")
        assert set(outcome.codes) == {0}, outcome.said
        require_same(run_of(data), run_of(self.reference))
        left = [*run_of(data).rglob("*.part"), *Path(data["output"]["cache"]).rglob("*.part")]
        assert not left, left
        self.tally.runs += 1

    def kill(self, data: dict[str, Any], preparing: bool) -> bool:
        """Start the run, kill one process or all, and look at what is left; false if it was done before."""
        of = self.random.choice(PROCESSES)
        who = self.random.choice(WHO) if of > 1 else "all"
        if self.random.random() < 0.4:
            moment = "a random second"
            kills = dict.fromkeys(self.hit(who, of), self.random.uniform(0.05, 1.0) * self.seconds)
            outcome = self.launcher.train(*[data] * of, resume="auto", kills=kills)
        else:
            moment = self.random.choice(PREPARING if preparing else TRAINING)
            who = "the first" if of > 1 and moment.startswith(OF_THE_FIRST) else who
            armed = dict.fromkeys(self.hit(who, of), f"{moment}:{self.random.randint(1, 2)}=kill")
            outcome = self.launcher.train(*[data] * of, resume="auto", moments=armed, alone=True)
        if set(outcome.codes) == {0}:
            return False
        assert all(code in (0, LOST, -9) for code in outcome.codes), (moment, who, outcome.codes, outcome.said)
        assert max(outcome.after) < MOST, (moment, who, outcome.after, outcome.said)
        self.tally.kills[who] += 1
        self.tally.processes[of] += 1
        self.tally.preparing += not run_of(data).exists()
        self.tally.moments[moment] += 1
        self.tally.codes.update(code for code in outcome.codes if code != -9)
        self.tally.slowest = max(self.tally.slowest, *outcome.after)
        self.look(run_of(data))
        return True

    def hit(self, who: str, of: int) -> Sequence[int]:
        """Which of so many processes are killed. At a random second the launcher ends the others, which may not have
        met yet."""
        return {"the first": [0], "another": [self.random.randrange(1, max(of, 2))], "all": range(of)}[who]

    def look(self, run: Path) -> None:
        """What a kill leaves is whole."""
        saved = [step for step, folder in checkpoint.list_checkpoints(run) if checkpoint.read_checkpoint(folder)]
        done = [row["step"] for row in read_metrics(run)] if run.exists() else []
        again = max(0, len(done) - max(saved, default=0))
        assert done == list(range(1, len(done) + 1)) and again <= EVERY, (done, saved)
        self.tally.repeated = max(self.tally.repeated, again)


# A process of a run under torchrun. In the third of four steps, between two of its two micro-batches, the second one
# is attacked; the run of which torchrun is killed has long steps, so that its processes would go on for a while.
RANK = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
config, attack, stuck, place = sys.argv[1:]
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(place, f"{start}-{rank}.pid").write_text(str(os.getpid()))
from simpletune.apps.cli.main import main
from simpletune.stages.step.train_step import TrainStep
from simpletune.training import heartbeats
heartbeats.PATIENCE = replace(heartbeats.PATIENCE, stuck=float(stuck))
compute, passes = TrainStep.compute, []
def attacked(self, *words):
    passes.append(1)
    time.sleep(6 if attack == "launcher killed" else 1)  # a process counts as alive after its second heartbeat
    if (rank, start, len(passes)) == ("1", "0", 6) and attack in ("stopped", "hangs"):
        Path(place, "attacked").touch()
        os.kill(os.getpid(), signal.SIGSTOP) if attack == "stopped" else time.sleep(600)
    return compute(self, *words)
TrainStep.compute = attacked
sys.exit(main(["train", config, "--resume", "auto"]))
"""
STUCK = 20.0  # seconds without progress after which a hang is found in the row below; a run's own limit is 30 min
ATTACKS = {  # what the docs promise: the longest time until the others have ended, and what they say
    "stopped": (34.0, "process 1 on .* has sent no heartbeat for"),
    "hangs": (STUCK + 10, "no process has done anything for .*, so an exchange hangs"),
    "launcher killed": (34.0, "process 0 or its launcher is gone"),
}


class Attack:
    """A run of two processes under torchrun that is attacked once, and goes on to the end of an unkilled one.

    Args:
        what: one of ``ATTACKS``.
        data: configuration of a run whose cache is full.
        folder: where to.
    """

    def __init__(self, what: str, data: dict[str, Any], folder: Path):
        folder.mkdir()
        self.what, self.folder, self.log = what, folder, folder / "log"
        self.data = changed(data, what.replace(" ", "-"))
        (folder / "config.json").write_text(json.dumps(self.data))
        (folder / "rank.py").write_text(RANK)

    @contextmanager
    def torchrun(self, attack: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """Start the run; at the end nothing of it is left."""
        words = [str(self.folder / "config.json"), attack, str(STUCK if attack == "hangs" else 1800), str(self.folder)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   "--max-restarts", "1", str(self.folder / "rank.py"), *words]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("ab") as log:
            launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            yield launcher
        finally:
            launcher.kill()
            launcher.wait()
            for file in self.folder.glob("*.pid"):
                if not self.is_gone(file.stem):
                    os.kill(int(file.read_text()), signal.SIGKILL)

    def survive(self, reference: dict[str, Any]) -> None:
        """Attack the run, and print what happened."""
        limit, said = ATTACKS[self.what]
        again = ""
        if self.what == "launcher killed":
            found, codes = self.without_launcher(limit)
            with self.torchrun() as launcher:
                assert launcher.wait(300) == 0, self.log.read_text()
        else:
            with self.torchrun(self.what) as launcher:
                self.wait_for((self.folder / "attacked").exists, 120)
                found = self.wait_for(partial(self.is_gone, "0-0"), limit)
                assert launcher.wait(300) == 0, self.log.read_text()
            codes = [int(code) for code in re.findall(r"failed \(exitcode: (-?\d+)\)", self.log.read_text())]
            times = [(self.folder / name).stat().st_mtime for name in ("attacked", "1-0.pid")]
            again = f", started again after {times[1] - times[0]:.1f} s"
        print(f"{self.what:<16} the others ended after {found:4.1f} s with {codes}{again}", flush=True)
        assert set(codes) == {LOST}, self.log.read_text()
        assert re.search(said, self.log.read_text()), self.log.read_text()
        require_same(run_of(self.data), run_of(reference))

    def without_launcher(self, limit: float) -> tuple[float, list[int]]:
        """Kill torchrun during the second step; its processes must end, and write nothing more."""
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: they become this process's children, with their codes
        run, names = run_of(self.data), ("0-0", "0-1")
        with self.torchrun(self.what) as launcher:
            self.wait_for(lambda: run.exists() and bool(read_metrics(run)), 120)
            launcher.kill()
            launcher.wait()
            found = self.wait_for(lambda: all(map(self.is_gone, names)), limit)
            before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
            assert len(read_metrics(run)) < STEPS, "they went on to the end"
            time.sleep(3)
            assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*")}
        numbers = [int((self.folder / f"{name}.pid").read_text()) for name in names]
        return found, [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers]

    def is_gone(self, name: str) -> bool:
        """Whether a process, named by its start and rank, has ended; what it was waits for its parent or is reused."""
        command = Path("/proc", (self.folder / f"{name}.pid").read_text(), "cmdline")
        return not command.exists() or str(self.folder) not in command.read_text()

    def wait_for(self, done: Callable[[], bool], limit: float) -> float:
        """Wait until something is so, up to a limit in seconds; return how long it took."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() < began + limit, f"not within {limit:.0f} s: {self.log.read_text()}"
            time.sleep(0.05)
        return time.monotonic() - began


def torture(launcher: Launcher, folder: Path, kills: int, seed: int, attacks: Sequence[str]) -> Tally:
    """Attack runs under torchrun, then kill runs until the number of survived kills is reached."""
    began, every = time.monotonic(), Torture(launcher, folder, seed)
    for number, what in enumerate(attacks):
        Attack(what, every.data, folder / f"attack-{number}").survive(every.reference)
    number = 0
    while every.tally.kills.total() < kills:
        every.case(number, 5)
        number += 1
        print(f"{time.monotonic() - began:5.0f} s  {every.tally.kills.total():3} kills", flush=True)
    return every.tally


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as place, Launcher(Path(place) / "jobs") as launcher:
        tally = torture(launcher, Path(place), args.kills, seed, args.attacks)
    print("\n".join([*tally.lines(), f"{time.monotonic() - began:.0f} s, seed {seed}"]))


if __name__ == "__main__":
    main()
