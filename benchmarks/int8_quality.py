"""``int8-quality``: losses and pictures of runs with int8 products and gradients beside bf16's, three seeds each."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from benchmarks.int8 import INT8, ROTATED
from benchmarks.quality import STYLE, Easel, accuracies, drift, prompts_of, unrelated
from benchmarks.quiet import ALONE, quiet_config
from benchmarks.table import Results, describe_machine, prompted, table
from benchmarks.tiny_models import checker
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.runs.folder import read_metrics, read_summary
from simpletune.runs.weights import run_result
from simpletune.system.options import Json
from simpletune.system.sheets import grid
from simpletune.training.train import train

CONFIG, STEPS, ENDS = Path("benchmarks/style.json"), 60, 10
SEEDS = (0, 1, 2)
SHOWN = 3  # prompts of each kind in the sheet
PLAIN = "bf16"
PRODUCTS = [*INT8, "precision.products=int8", "precision.input_gradient=int8"]
KINDS: dict[str, list[str]] = {
    PLAIN: ["precision.weights=bf16", "precision.compute=bf16"],
    "int8 weights": INT8,
    "int8 products and gradients": PRODUCTS,
    "int8 products and gradients, rotated": [*PRODUCTS, ROTATED],
}
COLUMNS = {
    "what": "", "last": f"mean loss, last {ENDS} steps", "apart": "a step's loss, distance from bf16's",
    "eval_loss_after": "loss after, fixed noise", "style": f"{STYLE} with the trigger", "prompt": "prompt accuracy",
    "others": f"{STYLE} without it", "pixels": "pictures' distance from bf16's",
    "next": "from the next seed's of bf16",
}  # fmt: skip
ABOUT = f"""\
The demo's LoRA on the tiny SD3 after {STEPS} steps, with three seeds; with one seed, pictures, noise levels and noise
are the same whatever `precision` says. Each LoRA file draws with the base in bf16, as other programs load it. *With the
trigger* and *prompt accuracy*: of held-out prompts that name the style, what the demo's checker reads; *without it*: of
as many flat and painted ones. *Distance* of pictures: the mean absolute difference of those drawn from the same noise,
0 to 1; the last column is a yardstick. On a CPU, `torch._int_mm` computes the products with the kernel's arithmetic.
The errors of single layers are in [int8](int8.md). ![pictures](int8_quality.png)

Means of the seeds, with the least and most in brackets:
"""


class Trained(NamedTuple):
    """A run's losses, what its summary says, and what its file draws."""

    losses: list[float]
    summary: Json
    images: list[Image.Image]  # of the prompts with the trigger, then of the others


class Runs:
    """The runs, and the prompts that they share.

    Args:
        count: prompts per score.
        overrides: for the configuration of all runs.
    """

    def __init__(self, count: int, overrides: list[str]):
        self.overrides = overrides
        self.scratch = Path(tempfile.mkdtemp(prefix="simpletune-int8-quality-"))
        self.styled, self.others = prompts_of(count, STYLE, demo_scenes.STYLE_TRIGGER), unrelated(count)
        self.trained = cache(self._trained)

    def row(self, kind: str, seed: int) -> Json:
        """Compare a run with that of the same seed in bf16, which is trained if it has not been."""
        own, plain = self.trained(kind, seed), self.trained(PLAIN, seed)
        styled, others = own.images[: len(self.styled)], own.images[len(self.styled) :]
        scores = accuracies(styled, self.styled)
        return {
            "last": float(np.mean(own.losses[-ENDS:])),
            "apart": float(np.mean(np.abs(np.subtract(own.losses, plain.losses)))),
            "eval_loss_after": own.summary["eval_loss_after"],
            "style": scores["style"],
            "prompt": scores["prompt"],
            "others": float(np.mean([checker.read_image(image).style == STYLE for image in others])),
            "pixels": drift(own.images, plain.images),
            "next": drift(own.images, self.trained(PLAIN, SEEDS[(SEEDS.index(seed) + 1) % len(SEEDS)]).images),
            "of": len(styled),
        }

    def sheet(self) -> Image.Image:
        """Show what the runs of the first seed draw, and one of the second."""
        shown = [*range(SHOWN), *range(len(self.styled), len(self.styled) + SHOWN)]
        rows = [(f"{kind}, seed {SEEDS[0]}", self.trained(kind, SEEDS[0])) for kind in KINDS]
        rows.append((f"{PLAIN}, seed {SEEDS[1]}", self.trained(PLAIN, SEEDS[1])))
        titles = [[*self.styled, *self.others][number].text for number in shown]
        return grid([(name, [each.images[number] for number in shown]) for name, each in rows], titles)

    def _config(self, kind: str, seed: int) -> TrainConfig:
        options = [f"train.steps={STEPS}", *KINDS[kind], *self.overrides]
        more = (*ALONE, f"train.seed={seed}")
        return quiet_config(CONFIG, self.scratch, f"{list(KINDS).index(kind)}-{seed}", options, more)

    def _trained(self, kind: str, seed: int) -> Trained:
        run = train(self._config(kind, seed))
        summary = read_summary(run)
        assert summary is not None
        images = Easel.of(self._config(PLAIN, seed), run_result(run)).draw([*self.styled, *self.others])
        return Trained([float(row["loss"]) for row in read_metrics(run)], summary, images)


def means(rows: Mapping[str, Json]) -> dict[str, Json]:
    """Mean, least and most over the seeds of each kind."""
    found: dict[str, Json] = {}
    for kind in KINDS:
        own = [rows[name] for seed in SEEDS if (name := name_of(kind, seed)) in rows]
        if own:
            found[kind] = {key: spread([row[key] for row in own]) for key in list(COLUMNS)[1:]}
    return found


def spread(values: Sequence[float]) -> str:
    """Format a mean, and the least and most."""
    return f"{np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def name_of(kind: str, seed: int) -> str:
    """Name a row."""
    return f"{kind}, seed {seed}"


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows with ``count`` prompts per score; write their tables and a sheet of pictures."""
    results, runs = Results(folder / "int8_quality", COLUMNS, prompted("int8-quality", count)), Runs(count, overrides)
    rows = {name_of(kind, seed): partial(runs.row, kind, seed) for seed in SEEDS for kind in KINDS}
    known = len(results.rows)
    results.measure(rows, minutes, only, lambda row: f"{row['apart']:.5f} from bf16's loss, {row['style']:.0%} {STYLE}")
    if len(results.rows) > known:
        runs.sheet().save(results.stem.with_suffix(".png"))
    about = "\n".join([ABOUT, *table(COLUMNS, means(results.rows)), "", "## The seeds"])
    return results.write_table("int8 products and gradients: losses and pictures", about, describe_machine())
