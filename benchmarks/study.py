"""``study``: compare full fine-tuning with LoRA of rank 64, 16 and 1 by complete runs, and reproduce the two figures of
a study that compared them for SD3 Medium on an L4: runtime per epoch and peak memory.

On the tiny model it takes minutes on a CPU. With ``--model`` it repeats the study's own job: 1024 px, batch 1, gradient
checkpointing, int8 base by quanto for LoRA, bf16 for full fine-tuning.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.table import Results
from simpletune.config.load import read_config
from simpletune.config.schema import TrainConfig, run_folder
from simpletune.runs.folder import SUMMARY
from simpletune.runs.report import make_report, write_report
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.runs.report.run_data import RunData, read_run
from simpletune.system.console import say

DEMO, REAL = Path("benchmarks/style.json"), Path("configs/more/sd3_medium_lora_r16_int8.json")
FULL = "full"
LORA = ("precision.weights=int8-quanto", "adapter.dtype=bf16")
RUNS: dict[str, tuple[str, ...]] = {
    FULL: ("adapter.method=full", "precision.weights=bf16"),
    "LoRA r64": ("adapter.rank=64", *LORA),
    "LoRA r16": ("adapter.rank=16", *LORA),
    "LoRA r1": ("adapter.rank=1", *LORA),
}
BOTH = (
    "precision.compute=bf16", "optimizer.name=adamw_bf16", "memory.checkpointing=all", "schedule.name=polynomial",
    "checkpoint.every=null", "checkpoint.keep_last=1", "validation.every=null", "validation.loss_samples=16",
    "profile.max_traces=0", "memory.modulation=resident",
)  # fmt: skip
TINY = ("train.steps=120", "schedule.warmup_steps=5")
TINY_RATE = {FULL: ("optimizer.lr=0.0005",)}  # the demo's learning rate is for LoRA
STUDY = (
    "data.resolution=1024", "data.caption_dropout=0.05", "train.batch_size=1", "train.gradient_accumulation=1",
    "train.steps=200", "schedule.warmup_steps=100", "optimizer.lr=0.00001", "validation.guidance=3.0",
)  # fmt: skip
PUBLISHED: list[tuple[str, ...]] = [
    ("the study, full", "L4", "1024 px, batch 1, checkpointing", "20.26 GB", "2.56 s", "its plot data"),
    ("the study, LoRA r64, int8 (quanto)", "L4", "the same", "3.68 GB", "1.38 s", "its plot data"),
    ("the study, LoRA r16, int8 (quanto)", "L4", "the same", "3.54 GB", "1.89 s", "its plot data"),
    ("the study, LoRA r1, int8 (quanto)", "L4", "the same", "3.50 GB", "1.35 s", "its plot data"),
    ("SimpleTuner, LoRA r128, bf16", "L40S", "1024 px, batch 3, no checkpointing", "34.53 GiB", "1.189 s",
     "its segmented-checkpointing page"),
    ("SimpleTuner, LoRA r128, bf16", "L40S", "1024 px, batch 3, checkpointing", "7.62 GiB", "1.607 s", "the same"),
    ("SimpleTuner, LoRA r128, int8 (SDNQ)", "L40S", "1024 px, batch 3", "6.53 GiB", "1.857 s", "the same"),
    ("SimpleTuner, LoRA r128, fp8 weight-only", "L40S", "1024 px, batch 3", "5.65 GiB", "1.736 s", "the same"),
    ("kohya sd-scripts, full", "not said", "512 px, fused backward", "10.2 GB", "not said", "pull request 1866"),
]  # fmt: skip
ABOUT = "One of the four runs of python -m benchmarks study."
TITLE = "Full fine-tuning against LoRA of rank 64, 16 and 1"
ABOUT_TINY = (
    "The four runs of a study of SD3 Medium, repeated on the tiny model that ships with the tool, so only the sizes "
    "differ. Without a GPU the memory is that of the whole process, most of it Python and its libraries."
)
ABOUT_REAL = (
    "SD3 Medium at the settings of the study: 1024 px, batch 1, checkpointing; LoRA over an int8 base, full in bf16."
)
PUBLISHED_HEAD = ("run", "GPU", "job", "peak", "per step", "source")
PUBLISHED_NOTES = [
    "Figures that others published for SD3 and SD3.5 Medium on their machines, not measured with this tool.",
    "The study's plot calls its times runtime per epoch; by their size they are most likely seconds per step. Its full "
    "fine-tuning could not be repeated on 24 GB. Its claims: about 50% less time and 80% less memory with LoRA.",
]


def config_of(name: str, model: str | None, overrides: list[str]) -> tuple[Path, list[str], TrainConfig]:
    """Configure one of the four runs.

    Args:
        name: of the run.
        model: a hub name, a folder or a file; None: the tiny model.
        overrides: the user's, applied last.

    Returns:
        The configuration's file, all overrides, and the resulting configuration.
    """
    settings = [f"name=study-{name.lower().replace(' ', '-')}", f"about={ABOUT}", *RUNS[name], *BOTH]
    settings += [*STUDY, f"model.pretrained={model}"] if model else [*TINY, *TINY_RATE.get(name, ())]
    settings += overrides
    file = REAL if model else DEMO
    return file, settings, read_config(file, settings)[0]


def run(folder: Path, minutes: float, only: str, model: str | None, overrides: list[str]) -> Path:
    """Complete the missing runs, each in its own process, then write the report on all of them.

    Args:
        model: a hub name, a folder or a file; None: the tiny model.
    """
    results = Results(folder / "study", {})
    runs = {name: config_of(name, model, overrides) for name in RUNS}
    for name, (_, _, config) in runs.items():
        if not (run_folder(config) / SUMMARY).exists():
            results.rows.pop(name, None)  # the report needs the run's folder
    for name, (file, settings, config) in results.missing(runs, minutes, only):
        say(f"bench   {name}")
        subprocess.run([sys.executable, "-m", "simpletune", "train", str(file), *settings], check=True)
        results.add(name, row_of(read_run(run_folder(config))))
    done = {name: run_folder(runs[name][2]) for name in RUNS if name in results.rows}
    published = ReportTable("Not measured here", PUBLISHED_HEAD, PUBLISHED)
    section = ReportSection("published", "What others published", PUBLISHED_NOTES, tables=[published])
    lead = f"{ABOUT_REAL if model else ABOUT_TINY} Command: {results.command}."
    report = make_report(list(done.values()), title=TITLE, lead=lead, names=list(done), more=[section])
    return write_report(report, folder / "study.html")[0]


def row_of(run: RunData) -> dict[str, Any]:
    """Read the figures of a finished run."""
    keys = (
        "device", "steps", "steps_per_epoch", "trainable_parameters", "total_parameters", "seconds_per_step",
        "samples_per_second", "peak_allocated_gib", "peak_reserved_gib", "peak_rss_gib", "seconds_total", "first_loss",
        "final_loss", "eval_loss_before", "eval_loss_after",
    )  # fmt: skip
    return {key: run.summary[key] for key in keys}
