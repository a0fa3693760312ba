"""``choice``: whether the chosen checkpoint is better than the last one, on the tiny SD3 with its checker.

Eight fine-tunings of different methods and lengths. Each checkpoint is judged by the checker on prompts and seeds that
choosing never saw; the checkpoints chosen by fidelity, by held-out loss and by training loss stand beside the last one.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TypedDict

from benchmarks.quality import PRECISIONS, STYLE, Quality, accuracies, prompts_of, unrelated
from benchmarks.table import Results, describe_machine
from simpletune.cli.main import main as simpletune
from simpletune.demo import pictures
from simpletune.options import Json
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.choice import FIDELITY, choose
from simpletune.runs.folder import read_metrics
from simpletune.runs.weights import result_of
from simpletune.system.console import say
from simpletune.training.loop import train

FULL = ["adapter.method=full", *PRECISIONS["fp32"]]
ROWS: dict[str, list[str]] = {
    "LoRA r8, 200 steps": [],
    "LoRA r8, 600 steps": ["train.steps=600"],
    "LoRA r1, 200 steps": ["adapter.rank=1"],
    "LoRA r32, five times the learning rate, 300 steps": ["adapter.rank=32", "optimizer.lr=0.02", "train.steps=300"],
    "LoKr, 200 steps": ["adapter.method=lokr", "adapter.factor=8", "adapter.rank=8", "optimizer.lr=0.01"],
    "DoRA r8, 200 steps": ["adapter.method=dora", "adapter.rank=8"],
    "full, 200 steps": [*FULL, "optimizer.lr=0.0005"],
    "full, four times the learning rate, 400 steps": [*FULL, "optimizer.lr=0.002", "train.steps=400"],
}
PARTS = 5  # checkpoints of a run
COLUMNS = {
    "what": "", "last": "last", "chosen": "chosen", "step": "at step", "by": "by", "difference": "chosen - last",
    "held_out": "by held-out loss", "held_out_step": "at step", "training": "by training loss",
    "training_step": "at step", "best": "best of all",
}  # fmt: skip
ABOUT = f"""\
The demo's style learned from 26 of its 32 pictures, 6 held out; {PARTS} checkpoints a run, all kept. A checkpoint's
score is the mean of three shares, from 0 to 1, by the demo's checker: pictures in the style where the prompt has the
trigger word, prompt accuracy there, and prompt accuracy of prompts without it. Its prompts and seeds were not seen by
training or by choosing. *Chosen* is `RUN@best` after `simpletune evaluate RUN --seeds 1` with the demo's own encoders;
*by held-out loss* what it is without that; *by training loss* the checkpoint after the part of the run with the lowest
mean loss. *Best of all*: the highest score of a checkpoint, which no choice can exceed. The rule for models none of
which follows prompts as the base does was mended after these rows were first seen (it had taken the one that follows
them best, which was worse than the last in 4 of 8), and the choices were made again from the same evaluations: they are
no independent check of that rule."""


class Row(TypedDict):
    """One fine-tuning: scores, and the steps that were chosen."""

    last: float
    chosen: float
    step: int
    by: str
    difference: float
    held_out: float
    held_out_step: int
    training: float
    training_step: int
    best: float
    scores: dict[str, float]


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows; write ``choice.json`` and ``choice.md``.

    Args:
        folder: of the results.
        count: prompts per score, with and without the trigger word.
        minutes: start no row after this many.
        only: text that row names must contain.
        overrides: of the demo's configuration.

    Returns:
        The Markdown table.
    """
    results = Results(folder / "choice", COLUMNS)
    quality = Quality(folder, count, overrides)
    for name, options in results.missing(ROWS, minutes, only):
        row = measure(quality, options, count)
        say(f"bench   {name}: last {row['last']:.3f}, chosen {row['chosen']:.3f} by {row['by']}")
        results.add(name, {**row})
    rows = [row for name, row in results.rows.items() if name in ROWS]
    count_of = {key: sum(row[key] >= row["last"] for row in rows) for key in ("chosen", "held_out", "training")}
    told = (
        f"\n\nNot worse than the last one in {count_of['chosen']} of {len(rows)}; by held-out loss in "
        f"{count_of['held_out']}, by training loss in {count_of['training']}. The score of a checkpoint is over "
        f"{count} prompts with the trigger word and {count} without it."
    )
    return results.write_table("Which checkpoint: the choice against the last", ABOUT + told, describe_machine())


def measure(quality: Quality, options: list[str], count: int) -> Row:
    """Fine-tune once, choose, and score every checkpoint."""
    length = next((int(option.partition("=")[2]) for option in options if option.startswith("train.steps=")), 200)
    kept = [f"checkpoint.every={length // PARTS}", "checkpoint.keep_last=all", "validation.split=6"]
    folder = train(quality.config([*options, *kept, "validation.eval_samples=24"], "choice"))
    by_loss = choose(folder)
    simpletune(["evaluate", str(folder), "--seeds", "1"])
    chosen, steps = choose(folder), [step for step, _ in list_checkpoints(folder)]
    assert chosen is not None and by_loss is not None
    assert chosen.by == FIDELITY
    scores = {step: score(quality, [*options, *kept], folder, step, count) for step in steps}
    training = by_training_loss(read_metrics(folder), steps)
    last = scores[steps[-1]]
    return {
        "last": last, "chosen": scores[chosen.step], "step": chosen.step, "by": chosen.by,
        "difference": round(scores[chosen.step] - last, 4),
        "held_out": scores[by_loss.step], "held_out_step": by_loss.step,
        "training": scores[training], "training_step": training,
        "best": max(scores.values()), "scores": {str(step): value for step, value in scores.items()},
    }  # fmt: skip


def by_training_loss(metrics: list[Json], steps: list[int]) -> int:
    """The step that ends the part of the run with the lowest mean training loss."""
    parts = {step: [row["loss"] for row in metrics if before < row["step"] <= step]
             for before, step in zip([0, *steps], steps, strict=False)}  # fmt: skip
    return min(parts, key=lambda step: fmean(parts[step]))


def score(quality: Quality, options: list[str], folder: Path, step: int, count: int) -> float:
    """Score a checkpoint by the checker."""
    easel = quality.easel(options, result_of(folder, step=step))
    styled, without = prompts_of(count, STYLE, pictures.STYLE_TRIGGER), unrelated(count)
    found = accuracies(easel.draw(styled), styled)
    return round(fmean([found["style"], found["prompt"], accuracies(easel.draw(without), without)["prompt"]]), 4)
