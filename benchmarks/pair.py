"""``pair``: compare complete runs of simpletune and of diffusers' DreamBooth LoRA recipe, alternating, on the CPU.

Both train a tiny SD3 with 6 layers and 6 heads at 256 px, LoRA r16 on attention, batch 1, bf16, no checkpointing,
AdamW, from one model folder, with equal pictures, prompt, tokens, threads and environment. The result is the ratio
within a round, because a busy machine slows both. docs/explanation/measurements.md describes each side.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import Results, describe_machine, table
from simpletune.runs.folder import METRICS, SUMMARY
from simpletune.system.console import say
from simpletune.system.threads import usable_cores

PROMPT = "a glim picture of a large blue heart in the middle, on a cream background"
PICTURES, SIZE, STEPS, LAYERS, WARM_UP = 5, 256, 20, 6, 2
GOAL = 0.6
LAUNCHER = ("accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes=1", "--mixed_precision=bf16")
NOTHING = "platform"  # a module of Python that does almost nothing: it prints a line
LEAN: dict[str, Any] = {
    "validation": {"prompts": [], "loss_samples": 0, "every": None},
    "profile": {"max_traces": 0},
}
EVERYTHING: dict[str, Any] = {"validation": {"prompts": [PROMPT], "every": None}}
COLUMNS = {
    "what": "", "order": "first", "load": "load before", "step": "s/step", "their_step": "diffusers, s/step",
    "step_ratio": "ratio",
    "process": "process, s", "warm": "warm cache, s", "their_process": "diffusers, s", "process_ratio": "ratio",
    "warm_ratio": "warm, ratio", "saved_ratio": "until saved, ratio", "launched_ratio": "launched, ratio",
    "process_cpu": "CPU, s", "their_cpu": "diffusers, CPU, s", "cpu_ratio": "ratio",
}  # fmt: skip
WHOLE = "With everything on"
ABOUT = """\
A tiny SD3 ({layers} layers, {layers} heads), {size} px, LoRA r16 on attention, batch 1, bf16, AdamW, no checkpointing,
{steps} steps over {pictures} pictures with one prompt, {threads} thread(s) each. *diffusers*: its SD3 DreamBooth LoRA
recipe. Complete processes in alternating order; ratios are within a round, and the goal is {goal} for both. *process*:
with an empty cache; *warm cache*: the run before encoded prompts and pictures. Also with an empty cache: *until saved*,
diffusers without loading the pipeline after saving its LoRA; *launched*, diffusers plus the time of `accelerate launch`
for a module that does nothing, because its documentation starts it that way. Steps: the median without the first
{warm_up}. Both sides write a TensorBoard log, without previews, report, estimate, evaluation and traces; the second
table includes these: ours with its defaults, diffusers' with its validation pictures.

{verdict}"""


@dataclass(frozen=True)
class Job:
    """Inputs of both sides.

    Args:
        folder: for everything that both sides write.
        steps: of each run.
        overrides: for our configuration.
        layers: of the tiny model.
        size: of the pictures.
    """

    folder: Path
    steps: int
    overrides: Sequence[str] = ()
    layers: int = LAYERS
    size: int = SIZE

    @property
    def pipeline(self) -> Path:
        """Folder of the model."""
        return self.folder / "pipeline"

    @property
    def pictures(self) -> Path:
        """Folder of the data set."""
        return self.folder / "pictures"

    def prepare(self) -> None:
        """Write model and pictures."""
        from benchmarks.tiny_models import tiny_sd3
        from simpletune.data.demo import pictures

        tiny_sd3.build(self.pipeline, tiny_sd3.Sizes(layers=self.layers, heads=self.layers))
        scenes = pictures.sample_scenes(PICTURES, seed=3, style="striped")
        pictures.write_folder(self.pictures, scenes, seed=3, pixels=self.size)

    def config(self, name: str, cache: Path, whole: bool) -> dict[str, Any]:
        """Return our configuration: the recipe's settings, with all extras or as few as possible."""
        return {
            "name": name,
            "device": "cpu",
            "model": {"pretrained": str(self.pipeline), "t5_length": 77},
            "data": {"path": str(self.pictures), "prompt": PROMPT, "resolution": self.size},
            "adapter": {"method": "lora", "rank": 16},
            "precision": {"weights": "bf16"},
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "train": {"steps": self.steps, "batch_size": 1},
            "memory": {"checkpointing": "none"},
            "checkpoint": {"every": None},
            "output": {
                "runs": str(self.folder / "runs"),
                "profiles": str(self.folder / "profiles"),
                "cache": str(cache),
                "report": whole,
            },
            **(EVERYTHING if whole else LEAN),
        }


def run(
    folder: Path, rounds: int = 5, steps: int | None = None, minutes: float = 8.0, overrides: Sequence[str] = ()
) -> Path:
    """Measure the missing rounds, then one with everything on.

    Args:
        folder: for the results.
        rounds: number of rounds.
        steps: of each run; None: 20.
        minutes: start no round after this many.
        overrides: for our configuration.

    Returns:
        The Markdown table.
    """
    results = Results(folder / "pair", COLUMNS)
    names = [*(f"round {number + 1}" for number in range(rounds)), "everything on"]
    with tempfile.TemporaryDirectory() as place:
        job = Job(Path(place), steps or STEPS, overrides)
        if any(results.lacks(name) for name in names):
            job.prepare()
        for number, (name, _) in enumerate(results.missing(dict.fromkeys(names), minutes)):
            begun = (len(results.rows) + number) % 2 if name == names[-1] else int(name.split()[1]) % 2 - 1
            row = one_round(job, f"{number}", ours_first=begun == 0, whole=name == names[-1])
            results.add(name, row)
            say(f"bench   {name}: steps {row['step_ratio']:.2f}, processes {row['process_ratio']:.2f} of diffusers'")
    return write_page(results, job)


def write_page(results: Results, job: Job) -> Path:
    """Write the tables."""
    rows = [row for row in results.rows.values() if "table" not in row]
    about = ABOUT.format(
        layers=job.layers, size=job.size, steps=job.steps, pictures=PICTURES, threads=threads(), goal=GOAL,
        warm_up=WARM_UP, verdict="\n".join(table({"what": "ours to diffusers'", **VERDICT}, verdict(rows))),
    )  # fmt: skip
    return results.write_table("Against diffusers, on the CPU", about, describe_machine(), {WHOLE: COLUMNS})


VERDICT = {"median": "median", "least": "least", "most": "most"}


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute median, minimum and maximum of each ratio over the rounds."""
    titles = {
        "step_ratio": "seconds a step", "process_ratio": "seconds of the process", "warm_ratio": "warm cache",
        "saved_ratio": "until saved", "launched_ratio": "launched", "cpu_ratio": "CPU seconds",
    }  # fmt: skip
    values = {title: [row[key] for row in rows if key in row] for key, title in titles.items()}
    return {
        title: {"median": statistics.median(each), "least": min(each), "most": max(each)}
        for title, each in values.items()
        if each
    }


def one_round(job: Job, name: str, ours_first: bool, whole: bool = False) -> dict[str, Any]:
    """Run each side, ours twice: with an empty cache, then with a full one.

    Args:
        job: inputs of both sides.
        name: of the runs.
        ours_first: run ours before diffusers'.
        whole: run once with everything on.
    """
    row: dict[str, Any] = {"order": "ours" if ours_first else "diffusers", "load": round(os.getloadavg()[0], 2)}
    sides: list[Callable[[], dict[str, Any]]] = [lambda: ours(job, name, whole), lambda: theirs(job, name, whole)]
    for side in sides if ours_first else sides[::-1]:
        row |= side()
    row |= {
        "step_ratio": round(row["step"] / row["their_step"], 4),
        "process_ratio": round(row["process"] / row["their_process"], 4),
        "cpu_ratio": round(row["process_cpu"] / row["their_cpu"], 4),
    }
    if whole:
        return row | {"table": WHOLE}
    row["launcher"] = round(timed([*LAUNCHER, "-m", NOTHING])[0] - timed([NOTHING])[0], 3)
    row["launched_ratio"] = round(row["process"] / (row["their_process"] + row["launcher"]), 4)
    row["saved_ratio"] = round(row["process"] / (row["their_process"] - row["their_after"]), 4)
    return row | {"warm_ratio": round(row["warm"] / row["their_process"], 4)}


def ours(job: Job, name: str, whole: bool) -> dict[str, Any]:
    """Run ``python -m simpletune train``."""
    cache = job.folder / f"cache-{name}"
    row: dict[str, Any] = {}
    for kind in ("process",) if whole else ("process", "warm"):
        run_name = f"{kind}-{name}"
        file = job.folder / f"{run_name}.json"
        file.write_text(json.dumps(job.config(run_name, cache, whole)), encoding="utf-8")
        row[kind], row[f"{kind}_cpu"] = timed(["simpletune", "train", str(file), *job.overrides])
        folder = job.folder / "runs" / run_name
        summary = json.loads((folder / SUMMARY).read_text())
        if kind == "process":
            lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
            row["step"] = round(median([line["seconds"] for line in lines]), 5)
            row["stages"] = {key: value["seconds"] for key, value in summary["stages"].items()}
            row["setup"] = summary["seconds_setup"]
    return row


def theirs(job: Job, name: str, whole: bool) -> dict[str, Any]:
    """Run ``python -m benchmarks.dreambooth``."""
    out = job.folder / f"theirs-{name}"
    command = ["benchmarks.dreambooth", str(job.pipeline), str(job.pictures), str(out), "--prompt", PROMPT]
    seconds, cpu = timed([*command, "--steps", str(job.steps), "--size", str(job.size), *["--whole"] * whole])
    found = json.loads((out / "seconds.json").read_text())
    step, after = round(median(found["seconds"]), 5), round(found["after"], 3)
    return {"their_process": seconds, "their_cpu": cpu, "their_step": step, "their_after": after}


def median(seconds: Sequence[float]) -> float:
    """Median without the first steps, if there are others."""
    return statistics.median(seconds[WARM_UP:] or seconds)


def threads() -> int:
    """Return the environment of each process."""
    return int(os.environ.get("OMP_NUM_THREADS", usable_cores()))


def timed(words: Sequence[str]) -> tuple[float, float]:
    """Time a complete Python process of a module: seconds, and CPU seconds, which other work affects less.

    Raises:
        CalledProcessError: the process failed; its output is shown.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads()), "TOKENIZERS_PARALLELISM": "false"}
    clock, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
    taken, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(taken, 3), round(cpu, 3)
