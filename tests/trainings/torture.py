"""Kill runs with SIGKILL over and over: what remains must be whole, and the end equal that of a run never killed.

``make torture`` does all of it; ``tests/trainings/test_torture.py`` a few kills. A printed seed draws the cases.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import failpoints
import tiny_sdxl
import torch
from cases import members
from launching import preload
from safetensors.torch import load_file

from benchmarks.tiny_models import tiny_klein, tiny_qwen_image, tiny_sd3, tiny_zimage
from simpletune.config.load import validate
from simpletune.data.demo import demo_scenes
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.system.devices import prepare_environment
from simpletune.system.options import ConfigError
from simpletune.training.train import train

STEPS = 7
PER_CASE = 4  # kills of one run
MODELS: dict[str, dict[str, Any]] = {
    "sd3": {"t5_length": 8}, "sdxl": {}, "klein": {"text_length": 64}, "zimage": {"text_length": 64},
    "qwen_image": {"text_length": 64},
}  # fmt: skip
PIXELS = {"sd3": 32, "sdxl": 64, "klein": 64, "zimage": 64, "qwen_image": 64}
ROOT = Path(__file__).resolve().parents[2]
ONLY_WHEN_RESUMED = {"run.opened-again", "run.restored"}


@dataclass
class Tally:
    """What was done so far."""

    kills: int = 0
    whole: int = 0
    runs: int = 0
    cases: list[str] = field(default_factory=list)
    named: Counter[str] = field(default_factory=Counter)
    random: Counter[str] = field(default_factory=Counter)
    repeated: list[int] = field(default_factory=list)

    def lines(self) -> list[str]:
        """In words."""
        stages = ", ".join(f"{stage} {count}" for stage, count in self.random.most_common())
        return [
            f"kills survived            {self.kills} ({self.kills - self.whole} of forked children, "
            f"{self.whole} of whole processes)",
            f"  at named failpoints     {self.named.total()}, at {len(self.named)} of {len(failpoints.NAMES)} moments",
            f"  at random moments       {self.random.total()}, last passed: {stages}",
            f"runs ended like unkilled  {self.runs}: weights, optimizer, losses and pictures, bit for bit",
            f"steps done again          {sum(self.repeated)}, at most {max(self.repeated, default=0)} after a kill",
            f"combinations              {len(set(self.cases))}",
        ]


class Ground:
    """Tiny models and pictures, and the drawing of cases from a seed.

    Args:
        families: of the models to draw from.
        prompts_alone: whether the runs are sliders.
    """

    def __init__(self, folder: Path, seed: int, families: Sequence[str], prompts_alone: bool = False):
        self.folder, self.random, self.families = folder, random.Random(seed), families
        self.prompts_alone = prompts_alone
        shape = replace(tiny_sd3.MINIMAL, layers=2, heads=2)
        tiny_sd3.build(folder / "sd3", shape, seed=1, dtype="fp32")
        tiny_sdxl.build(folder / "sdxl", seed=1)
        tiny_klein.build(folder / "klein", seed=1)
        tiny_zimage.build(folder / "zimage", seed=1)
        tiny_qwen_image.build(folder / "qwen_image", seed=1)
        scenes = demo_scenes.sample_scenes(6, seed=3, style="flat")
        demo_scenes.write_folder(folder / "pictures", scenes, seed=3, pixels=64)

    def case(self, number: int) -> dict[str, Any]:
        """The configuration of a run; drawn again until the options go together."""
        pick = self.random.choice
        adapters = [each for each in members("adapter") if each["method"] not in ("hypernetwork", "none")]
        for tried in range(5000):
            if tried % 500 == 0:  # seldom, because most combinations that go together are LoRA's
                adapter = pick(adapters)
            in_backward, optimizer = pick([True, False, False]), pick(members("optimizer"))
            family = pick(self.families)
            data: dict[str, Any] = {
                "name": f"case-{number}",
                "device": "cpu",
                "model": {"family": family, "pretrained": str(self.folder / family)} | MODELS[family],
                "data": {
                    "path": str(self.folder / "pictures"), "resolution": PIXELS[family], "caption_dropout": 0.3
                },
                "adapter": adapter,
                "precision": pick(members("precision")),
                "optimizer": optimizer | {"lr": 1.0 if optimizer["name"] == "prodigy" else 0.001},
                "train": {"steps": STEPS, "gradient_accumulation": pick([1, 2])}
                | ({"clip": "per_parameter"} if in_backward else {}),
                "ema": pick([None, {"decay": 0.9}]),
                "memory": {
                    "modulation": pick(["resident", "plan"]),
                    "modulation_window": 3,
                    "resident_blocks": pick([None, 1]),
                    "optimizer_in_backward": in_backward,
                },
                "checkpoint": {"every": pick([1, 2, 3]), "keep_last": pick([1, 2])},
                "validation": {"every": pick([2, 3]), "prompts": ["a red disc"], "steps": 2, "loss_samples": 2},
                "profile": {"max_traces": 0},
                "tracking": {"tensorboard": pick([True, False])},
                "output": {"report": pick([True, False, False])},
            }  # fmt: skip
            if self.prompts_alone:
                del data["data"]
                direction = {"target": "a disc", "positive": "a red disc", "negative": "a blue disc"}
                kept = pick([{}, {"preserved": ["a heart", "a star"]}])
                side = 128 if family == "sdxl" else PIXELS[family]
                data["concept"] = {"directions": [direction | kept], "resolutions": [side], "drawing_steps": 4}
                data["validation"]["loss_samples"] = 0
            try:
                validate(data, "case")
            except ConfigError:
                continue
            return data
        raise AssertionError("no combination goes together")

    def placed(self, data: dict[str, Any], place: str) -> dict[str, Any]:
        """The case with all that it writes under one folder."""
        here = self.folder / data["name"] / place
        places = {name: str(here / name) for name in ("runs", "profiles", "cache")}
        return {**data, "output": data["output"] | places}


def name_of(data: dict[str, Any]) -> str:
    """A case in words."""
    memory, precision = data["memory"], data["precision"]
    parts = [
        data["model"]["family"],
        data["adapter"]["method"],
        "-".join(precision.values()),
        data["optimizer"]["name"],
    ]
    parts += [f"accumulation {data['train']['gradient_accumulation']}"] * (data["train"]["gradient_accumulation"] > 1)
    parts += ["plan"] * (memory["modulation"] == "plan") + ["streamed"] * (memory["resident_blocks"] is not None)
    parts += ["in-backward"] * memory["optimizer_in_backward"] + ["ema"] * (data["ema"] is not None)
    return ", ".join(parts)


class Process:
    """One start of ``train --resume auto``, that may be killed.

    Args:
        data: the configuration.
        kill: a failpoint and a count, or a delay in seconds; None: not killed.
        whole: a process of its own, not a forked child.
    """

    def __init__(self, data: dict[str, Any], kill: tuple[str, int] | float | None, whole: bool = False):
        self.base = Path(data["output"]["runs"]).parent
        self.base.mkdir(parents=True, exist_ok=True)
        self.log, self.passed_file, self.began = self.base / "log.txt", self.base / "passed.txt", time.perf_counter()
        self.passed_file.write_bytes(b"")
        self.pid = self._start(data, kill) if whole else self._fork(data, kill)
        timer = None
        if isinstance(kill, float):
            handle = os.pidfd_open(self.pid)
            timer = threading.Timer(kill, signal.pidfd_send_signal, (handle, signal.SIGKILL))
            timer.start()
        _, status = os.waitpid(self.pid, 0)
        if timer is not None:
            timer.cancel()
            timer.join()
            os.close(handle)
        self.seconds = time.perf_counter() - self.began
        self.killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        self.code = os.waitstatus_to_exitcode(status)
        self.passed = self.passed_file.read_text().split()
        self._no_orphan()

    def _fork(self, data: dict[str, Any], kill: tuple[str, int] | float | None) -> int:
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            passed = os.open(self.passed_file, os.O_WRONLY | os.O_APPEND)
            failpoints.watch(lambda name: os.write(passed, f"{name}\n".encode()))
            if isinstance(kill, tuple):
                failpoints.arm(kill[0], "kill", kill[1])
            train(validate(data, "torture"), "auto")
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _start(self, data: dict[str, Any], kill: tuple[str, int] | float | None) -> int:
        file = self.base / "config.json"
        file.write_text(json.dumps(data))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        armed = (
            ["tests/support/failpoints.py", f"{kill[0]}:{kill[1]}=kill"]
            if isinstance(kill, tuple)
            else ["-m", "simpletune"]
        )
        command = [sys.executable, *armed, "train", str(file), "--resume", "auto"]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            ).pid

    def _no_orphan(self) -> None:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return
        raise AssertionError(f"processes of {self.pid} are left")


class Case:
    """One run, killed several times, beside one that never was.

    Args:
        ground: model and pictures.
        number: of the case.
        tally: what is counted.
        whole: its kills are of whole processes.
    """

    def __init__(self, ground: Ground, number: int, tally: Tally, whole: bool = False):
        self.ground, self.tally, self.whole = ground, tally, whole
        data = ground.case(number)
        self.every, self.name = data["checkpoint"]["every"], name_of(data)
        tally.cases.append(self.name)
        self.reference = ground.placed(data, "reference")
        self.victim = ground.placed(data, "victim")
        self.run = Path(self.victim["output"]["runs"]) / data["name"]
        first = Process(self.reference, None)
        assert first.code == 0, f"{self.name}: {first.log.read_text()[-3000:]}"
        self.moments, self.seconds = Counter(first.passed), first.seconds

    def kill(self, kills: int) -> None:
        """Kill so many times, then let it end, and compare."""
        for number in range(kills):
            before = self.saved_step()
            process = Process(self.victim, self.moment(number), self.whole)
            self.check_start(process, before)
            if not process.killed:
                break
            self.count(process)
            self.check_remains()
        else:
            before = self.saved_step()
            process = Process(self.victim, None)
            self.check_start(process, before)
        assert process.code == 0, f"{self.name}: {process.log.read_text()[-3000:]}"
        self.compare()
        self.tally.runs += 1

    def moment(self, number: int) -> tuple[str, int] | float:
        """A failpoint that was not hit yet, or a random moment."""
        draw = self.ground.random
        left = 1 - self.saved_step() / (STEPS + 1)
        if number % 2:
            begins = 4.0 if self.whole else 0.0  # imports alone take that long
            self.asked: str | None = None
            return begins + draw.uniform(0.02, 0.95) * self.seconds * (left if number > 1 else 1)
        possible = [name for name in self.moments if self.moments[name]]
        possible += list(ONLY_WHEN_RESUMED) * (self.saved_step() > 0)
        possible += ["run.cleared"] * (self.run.exists() and not self.saved_step())
        fewest = min(self.tally.named[name] for name in possible)
        self.asked = draw.choice(sorted(name for name in possible if self.tally.named[name] == fewest))
        often = max(1, int(self.moments[self.asked] * left))
        return self.asked, draw.randint(1, often)

    def count(self, process: Process) -> None:
        """Add a kill to the tally."""
        self.tally.kills += 1
        self.tally.whole += self.whole
        self.name += f"; killed at {self.asked or 'random'} after {process.passed[-1:]} of step {self.saved_step()}"
        if self.asked is not None:
            self.tally.named[self.asked] += 1
        else:
            last = process.passed[-1] if process.passed else "(whole process)" if self.whole else "start"
            self.tally.random[last.partition(".")[0]] += 1

    def saved_step(self) -> int:
        """The step of the last checkpoint; 0: none."""
        found = checkpoint.list_checkpoints(self.run)
        return found[-1][0] if found else 0

    def check_start(self, process: Process, before: int) -> None:
        """It went on at the last checkpoint, and did no step twice."""
        assert process.killed or process.code == 0, f"{self.name}: {process.log.read_text()[-3000:]}"
        begun = process.passed.count("step.begun")
        assert begun <= STEPS - before
        if not process.killed and not self.whole:
            assert begun == STEPS - before

    def check_remains(self) -> None:
        """What a kill leaves is whole, and no step is missing or doubled."""
        for _, folder in checkpoint.list_checkpoints(self.run):
            checkpoint.read_checkpoint(folder)
        done = [row["step"] for row in read_metrics(self.run)]
        again = max(0, len(done) - self.saved_step())
        assert done == list(range(1, len(done) + 1)), (self.name, done)
        assert again <= self.every, (self.name, again)
        self.tally.repeated.append(again)

    def compare(self) -> None:
        """The end is that of the run that was never killed."""
        other = Path(self.reference["output"]["runs"]) / self.run.name
        folders = [sorted(f.relative_to(run) for f in run.rglob("*") if f.is_file()) for run in (self.run, other)]
        assert folders[0] == folders[1], (self.name, set(folders[0]) ^ set(folders[1]))
        for file in folders[0]:
            if file.suffix == ".safetensors":
                mine, theirs = load_file(self.run / file), load_file(other / file)
                assert mine.keys() == theirs.keys()
                unlike = [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]
                assert not unlike, (self.name, file, unlike)
            if file.suffix == ".png" or file.name == "evaluations.jsonl":
                assert (self.run / file).read_bytes() == (other / file).read_bytes(), (self.name, file)
        rows = [[{**row, "seconds": 0} for row in read_metrics(run)] for run in (self.run, other)]
        assert rows[0] == rows[1] and len(rows[0]) == STEPS, self.name
        base = self.run.parent.parent
        assert not (left := list(base.rglob("*.part"))), (self.name, left)
        assert [f.name for f in self.run.parent.iterdir() if not f.name.endswith(".lock")] == [self.run.name]


def torture(
    kills: int, whole: int, seed: int, folder: Path, limit: float, families: Sequence[str], prompts_alone: bool = False
) -> Tally:
    """Kill runs until so many kills are survived.

    Args:
        kills: how many at least.
        whole: how many of these are kills of whole processes.
        seed: draws everything.
        folder: where to.
        limit: seconds.
        families: of the models.
    """
    began, tally, number = time.perf_counter(), Tally(), 0
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers' loading threads and torch's pool do not survive a fork
    ground = Ground(folder, seed, families, prompts_alone)
    while tally.kills < kills:
        in_whole = tally.whole < whole
        want = min(5, whole - tally.whole) if in_whole else min(PER_CASE, kills - tally.kills)
        case = Case(ground, number, tally, in_whole)
        case.kill(want)
        number += 1
        seconds = time.perf_counter() - began
        print(f"{seconds:5.0f} s  {tally.kills:3} kills  {case.name}", flush=True)
        assert seconds < limit, f"{tally.kills} of {kills} kills in {limit:.0f} s. {tally.lines()}"
    return tally


def main() -> None:
    """The command line of ``make torture``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--whole", type=int, default=10, help="of them kills of whole processes")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--family", choices=MODELS, action="append", help="draw only from these (default: all)")
    parser.add_argument("--slider", action="store_true", help="runs from prompts alone")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    prepare_environment()
    preload()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        families = args.family or list(MODELS)
        tally = torture(args.kills, args.whole, seed, Path(folder), args.limit, families, args.slider)
    print("\n".join([*tally.lines(), f"{time.perf_counter() - began:.0f} s, seed {seed}"]))


if __name__ == "__main__":
    main()
