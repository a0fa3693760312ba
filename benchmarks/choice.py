"""``choice``: whether the chosen checkpoint is better than the last one, on the tiny SD3 with its checker.

Each of three sets has seven or eight fine-tunings of different methods and lengths. The checker judges each checkpoint
on prompts and seeds that the choice never saw; the checkpoints chosen by fidelity, by held-out loss and by training
loss are compared with the last one. The rule was corrected after the first set was seen; the second was measured once,
after that. By both, a run without an evaluation takes the last instead of the lowest held-out loss; the third set,
measured once, checks that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from PIL import Image

from benchmarks.judged import lacking, read_shares, subject_prompts
from benchmarks.quality import PRECISIONS, STYLE, Easel, Quality, accuracies, prompts_of, unrelated
from benchmarks.table import Results, describe_machine, prompted
from simpletune.apps.cli.main import main as simpletune
from simpletune.config.validation_schedule import TRAINED
from simpletune.data.demo import demo_scenes
from simpletune.runs.best_checkpoint import FIDELITY, choose_best, held_out_rows, lowest_held_out
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import DRIFT, read_metrics
from simpletune.runs.weights import BASE, Weights, run_result
from simpletune.system.options import Json
from simpletune.system.safetensors_file import read_header
from simpletune.system.sheets import grid
from simpletune.training.train import train

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
SUBJECT = [
    "data.path=demo:subject", "adapter.targets=all_linear", "optimizer.lr=0.001", "objective.logit_mean=0",
    "train.batch_size=4",
]  # fmt: skip
SECOND: dict[str, list[str]] = {
    "style: LoRA r4 on attention, 300 steps": [
        "adapter.rank=4", "adapter.targets=attention", "train.steps=300", "train.seed=11",
    ],
    "style: LoHa r4, 250 steps": ["adapter.method=loha", "optimizer.lr=0.01", "train.steps=250", "train.seed=12"],
    "style: OFT, 250 steps": ["adapter.method=oft", "optimizer.lr=0.002", "train.steps=250", "train.seed=13"],
    "style: partial (attention), 400 steps": [
        "adapter.method=partial", *PRECISIONS["fp32"], "optimizer.lr=0.001", "train.steps=400", "train.seed=14",
    ],
    "subject: LoRA r8, 150 steps": [*SUBJECT, "train.steps=150", "train.seed=15"],
    "subject: LoRA r16, four times the learning rate, 400 steps": [
        *SUBJECT, "adapter.rank=16", "optimizer.lr=0.004", "train.steps=400", "train.seed=16",
    ],
    "subject: DoRA r4, 300 steps": [
        "adapter.method=dora", "adapter.rank=4", *SUBJECT, "train.steps=300", "train.seed=17",
    ],
    "subject: full, 200 steps": [*FULL, *SUBJECT[:1], "optimizer.lr=0.0005", *SUBJECT[3:], "train.seed=18"],
}  # fmt: skip
"""Seeds, methods and data that differ from those of ``ROWS``."""
THIRD: dict[str, list[str]] = {
    "style: LoRA r16, rank-stabilised, 250 steps": [
        "adapter.rank=16", "adapter.rank_stabilized=true", "optimizer.lr=0.002", "train.steps=250", "train.seed=21",
    ],
    "style: LoKr, three times the learning rate, 300 steps": [
        "adapter.method=lokr", "adapter.factor=4", "adapter.rank=4", "optimizer.lr=0.03", "train.steps=300",
        "train.seed=22",
    ],
    "style: LoRA r4 on all linear layers, constant rate, 150 steps": [
        "adapter.rank=4", "adapter.targets=all_linear", "optimizer.lr=0.001", "schedule.name=constant",
        "train.steps=150", "train.seed=23",
    ],
    "style: full, 100 steps": [*FULL, "optimizer.lr=0.001", "train.steps=100", "train.seed=24"],
    "subject: LoHa r4, 200 steps": [
        "adapter.method=loha", "adapter.rank=4", *SUBJECT, "train.steps=200", "train.seed=25",
    ],
    "subject: OFT, 250 steps": ["adapter.method=oft", *SUBJECT, "train.steps=250", "train.seed=26"],
    "subject: partial (attention), four times the learning rate, 250 steps": [
        "adapter.method=partial", *PRECISIONS["fp32"], *SUBJECT[:1], "optimizer.lr=0.002", *SUBJECT[3:],
        "train.steps=250", "train.seed=27",
    ],
}  # fmt: skip
"""Methods, rates, lengths and seeds that differ from those of both other sets, for the rule that follows them."""
PARTS = 5  # checkpoints of a run
COLUMNS = {
    "what": "", "last": "last", "chosen": "chosen", "step": "at step", "by": "by", "difference": "chosen - last",
    "default": "without evaluate", "default_step": "at step",
    "held_out": "by held-out loss", "held_out_step": "at step", "training": "by training loss",
    "training_step": "at step", "best": "best of all",
    "low_noise": "loss, last - lowest: least noise", "high_noise": "most noise",
}  # fmt: skip
RULE = ("default", "default_step", "low_noise", "high_noise")  # not of the first two sets: the rule follows from them
IMAGES = "pictures"
IMAGED = ("style: LoRA r4 on attention, 300 steps", "subject: LoRA r8, 150 steps")  # of the second set
ABOUT = f"""\
{PARTS} checkpoints a run, all kept. A checkpoint's score is the mean of three shares, from 0 to 1, by the demo's
checker, on prompts and seeds that neither training nor the choice saw. For the style: pictures in the style when the
prompt has its word, prompt accuracy there, and prompt accuracy of prompts without the word. For the subject: pictures
that the checker reads like the subject itself (a purple ring), accuracy of background, size and position there, and
prompt accuracy of prompts without the word. *Chosen* is `RUN@best` after `simpletune evaluate RUN --seeds 1` with the
demo's own encoders; *by held-out loss* the one with the lowest, the earliest of those equal within the error; *by
training loss* the checkpoint after the part of the run with the lowest mean loss. *Best of all*: the highest score of
a checkpoint, which no choice can exceed."""
OF_FIRST = """\
The demo's style learned from 26 of its 32 pictures, 6 held out. The rule for the case that no checkpoint follows
prompts as well as the base was corrected after these rows were first seen (it had taken the one that follows them
best, which was worse than the last in 4 of 8), and the choices were repeated from the same evaluations, so they do
not check that rule independently. The second set does."""
OF_SECOND = """\
Data, methods, lengths and seeds differ from the first set; they were listed before any was measured, and measured once
with the current rule: the demo's style with 6 of 32 pictures held out, or the demo's subject with 1 of 5 held out."""
OF_THIRD = """\
Methods, rates, lengths and seeds differ from both other sets. They were listed, and the rule for a run without
`simpletune evaluate` was changed by the other two sets, before any was measured; each was measured once. *Without
evaluate* is `RUN@best` before `simpletune evaluate` by that rule: the last, unless its held-out loss, and not the
lowest, is above the base's by more than the error."""


@dataclass(frozen=True)
class Set:
    """A set of fine-tunings.

    Args:
        stem: of its files.
        rows: overrides of the demo's configuration by row.
        about: what sets it apart.
    """

    stem: str
    rows: dict[str, list[str]]
    about: str


SETS = {
    "first": Set("choice", ROWS, OF_FIRST),
    "second": Set("choice_second", SECOND, OF_SECOND),
    "third": Set("choice_third", THIRD, OF_THIRD),
}


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str], chosen: str = "first") -> Path:
    """Measure the missing rows of a set, with ``count`` prompts per score with the trigger word and as many without.

    Args:
        chosen: one of ``SETS``, or ``pictures``: train two rows of the second set again, and draw with them.

    Returns:
        The Markdown table, or the picture.
    """
    if chosen == IMAGES:
        quality, file = Quality(folder, count, overrides), folder / "choice_loss_or_score.png"
        runs = {row: train(quality.config(with_checkpoints(SECOND[row]), f"choice-{number}"))
                for number, row in enumerate(IMAGED)}  # fmt: skip
        known = Results(folder / SETS["second"].stem, COLUMNS).rows
        draw_loss_or_score(quality, runs, known, count).save(file, optimize=True)
        return file
    wanted = SETS[chosen]
    columns = COLUMNS if chosen == "third" else {key: title for key, title in COLUMNS.items() if key not in RULE}
    words = prompted("choice", count) + f" --set {chosen}" * (chosen != "first")
    results = Results(folder / wanted.stem, columns, words)
    quality = Quality(folder, count, overrides)
    results.measure(
        {name: partial(measure, quality, options, count) for name, options in wanted.rows.items()}, minutes, only,
        lambda row: f"last {row['last']:.3f}, chosen {row['chosen']:.3f} by {row['by']}",
    )  # fmt: skip
    rows: list[Json] = [row for name, row in results.rows.items() if name in wanted.rows]
    for each in rows:
        each |= rises(each)
    count_of = {key: sum(row[key] >= row["last"] for row in rows) for key in ("chosen", "held_out", "training")}
    new = f" Without evaluate in {sum(row['default'] >= row['last'] for row in rows)}." if chosen == "third" else ""
    told = (
        f"\n\nNot worse than the last one in {count_of['chosen']} of {len(rows)}; by held-out loss in "
        f"{count_of['held_out']}, by training loss in {count_of['training']}.{new} The score of a checkpoint is over "
        f"{count} prompts with the trigger word and {count} without it."
    ) + "\n".join(["", *left] if (left := lacking(wanted.rows, results.rows)) else [])
    title = f"Which checkpoint: the choice against the last, {chosen} set"
    return results.write_table(title, f"{wanted.about}\n\n{ABOUT}{told}", describe_machine())


def measure(quality: Quality, options: list[str], count: int) -> Json:
    """Fine-tune once, choose, and score every checkpoint."""
    options = with_checkpoints(options)
    folder = train(quality.config(options, "choice"))
    default, by_loss = choose_best(folder), lowest_held_out(folder)
    simpletune(["evaluate", str(folder), "--seeds", "1"])
    chosen, steps = choose_best(folder), [step for step, _ in list_checkpoints(folder)]
    assert chosen is not None and default is not None and by_loss is not None
    assert chosen.by == FIDELITY
    scores = {step: round(fmean(shares(quality, options, run_result(folder, step=step), count)), 4) for step in steps}
    training = by_training_loss(read_metrics(folder), steps)
    last = scores[steps[-1]]
    return {
        "last": last, "chosen": scores[chosen.step], "step": chosen.step, "by": chosen.by,
        "difference": round(scores[chosen.step] - last, 4),
        "default": scores[default.step], "default_step": default.step,
        "held_out": scores[by_loss["step"]], "held_out_step": by_loss["step"],
        "training": scores[training], "training_step": training,
        "best": max(scores.values()), "losses": losses_by_noise(folder, steps),
        "scores": {str(step): value for step, value in scores.items()},
    }  # fmt: skip


def with_checkpoints(options: list[str]) -> list[str]:
    """Add the checkpoints and held-out pictures of a row to its options."""
    length = next((int(option.partition("=")[2]) for option in options if option.startswith("train.steps=")), 200)
    held_out = 1 if SUBJECT[0] in options else 6
    every = f"checkpoint.every={length // PARTS}"
    return [*options, every, "checkpoint.keep_last=all", f"validation.split={held_out}", "validation.loss_samples=24"]


def losses_by_noise(folder: Path, steps: list[int]) -> Json:
    """A run's mean held-out loss, before training and by checkpoint, in each quarter of the samples by noise level."""
    known = json.loads(read_header(folder / DRIFT)["__metadata__"]["of"])[TRAINED]
    levels = [level for _, _, level in known]
    order = sorted(range(len(levels)), key=levels.__getitem__)
    parts = [order[len(order) * n // 4 : len(order) * (n + 1) // 4] for n in range(4)]
    rows = {row["step"]: row["eval_losses"] for row in held_out_rows(folder)}
    return {
        "levels": [[round(levels[part[0]], 3), round(levels[part[-1]], 3)] for part in parts],
        "by_step": {str(step): [round(fmean(rows[step][n] for n in part), 4) for part in parts]
                    for step in (0, *steps)},
    }  # fmt: skip


def rises(row: Json) -> dict[str, float]:
    """How much higher the last checkpoint's held-out loss is than the lowest, in the quarters with the least and the
    most noise."""
    if "losses" not in row:
        return {}
    losses = row["losses"]["by_step"]
    lowest, last = losses[str(row["held_out_step"])], list(losses.values())[-1]
    return {"low_noise": last[0] - lowest[0], "high_noise": last[-1] - lowest[-1]}


def by_training_loss(metrics: list[Json], steps: list[int]) -> int:
    """The step that ends the part of the run with the lowest mean training loss."""
    parts = {step: [row["loss"] for row in metrics if before < row["step"] <= step]
             for before, step in zip([0, *steps], steps, strict=False)}  # fmt: skip
    return min(parts, key=lambda step: fmean(parts[step]))


def shares(quality: Quality, options: list[str], weights: Weights, count: int) -> tuple[float, float, float]:
    """The three shares by the checker whose mean is the score: learned, the prompt with the word, and without it."""
    easel = quality.easel(options, weights)
    without = unrelated(count)
    learned = subject_shares(easel, count) if SUBJECT[0] in options else style_shares(easel, count)
    return (*learned, accuracies(easel.draw(without), without)["prompt"])


def draw_loss_or_score(quality: Quality, runs: dict[str, Path], rows: Json, count: int) -> Image.Image:
    """Draw, from the same noise, with the base and with a run's checkpoints of the lowest held-out loss, by fidelity
    and the last; each run's pictures with losses and scores.

    Args:
        quality: of the runs.
        runs: their folders by row.
        rows: what was measured of them: ``choice_second.json``.
        count: prompts per score.
    """
    sheets = []
    for name, folder in runs.items():
        options, row = with_checkpoints(SECOND[name]), rows[name]
        of_subject = SUBJECT[0] in options
        asked = subject_prompts(2) if of_subject else prompts_of(2, STYLE, demo_scenes.STYLE_TRIGGER)
        losses = {each["step"]: each["eval_loss"] for each in held_out_rows(folder)}
        last = max(map(int, row["scores"]))
        models = {"base": 0, "lowest loss": row["held_out_step"], "by fidelity": row["step"], "last": last}
        drawn = []
        for title, step in models.items():
            weights = run_result(folder, step=step) if step else BASE
            learned, prompt, others = shares(quality, options, weights, count)
            parts = f"{learned:.2f} learned, {prompt:.2f} and {others:.2f} prompt"
            told = f"score {fmean([learned, prompt, others]):.3f} ({parts})"
            at = f", step {step}" if step else ""
            generated = quality.easel(options, weights).draw([*asked, *unrelated(2)[:1]])
            drawn.append((f"{title}{at}: loss {losses[step]:.3f}, {told}", generated))
        sheets.append(grid(drawn, [f"{name.partition(':')[0]}, with its word", "", "without it"]))
    whole = Image.new("RGB", (sum(sheet.width for sheet in sheets), max(sheet.height for sheet in sheets)), "white")
    for number, sheet in enumerate(sheets):
        whole.paste(sheet, (sum(each.width for each in sheets[:number]), 0))
    return whole


def style_shares(easel: Easel, count: int) -> tuple[float, float]:
    """The shares of pictures in the style, and of attributes that prompts with its word ask for."""
    styled = prompts_of(count, STYLE, demo_scenes.STYLE_TRIGGER)
    found = accuracies(easel.draw(styled), styled)
    return found["style"], found["prompt"]


def subject_shares(easel: Easel, count: int) -> tuple[float, float]:
    """The shares of pictures that are read as the subject, and of attributes that prompts with its word ask for."""
    asked = subject_prompts(count)
    return read_shares(easel.draw(asked), asked)
