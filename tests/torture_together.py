"""Kill one or all processes of runs of one, two and four over and over, even while they prepare together.

Each start of a run draws its number of processes. Survivors must end by themselves within 30 s, nothing may be lost,
and the end must equal, bit for bit, that of a run of two that was never killed. ``make torture-together`` does all of
it; ``tests/test_together.py`` a few kills.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launching import Launcher
from test_processes import changed, require_same, run_of

from benchmarks.tiny_models import tiny_sd3
from simpletune.data.demo import pictures
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
    pictures.write_folder(folder / "pictures", pictures.sample_scenes(13, seed=3, style="flat"), seed=3, pixels=32)
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


def torture(launcher: Launcher, folder: Path, kills: int, seed: int) -> Tally:
    """Kill runs until so many kills are survived."""
    began, every = time.monotonic(), Torture(launcher, folder, seed)
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
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as place, Launcher(Path(place) / "jobs") as launcher:
        tally = torture(launcher, Path(place), args.kills, seed)
    print("\n".join([*tally.lines(), f"{time.monotonic() - began:.0f} s, seed {seed}"]))


if __name__ == "__main__":
    main()
