"""``recipe``: what the demo's training reaches over its steps, and with more pictures, over five seeds each.

Prompts are those of ``quality``, fixed before any training: scenes whose shape, colour and background never occur
together in training, with the trigger word, and as many flat and painted ones without it.
"""

from __future__ import annotations

import tempfile
import time
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.quality import STYLE, Easel, accuracies, drift, prompts_of, unrelated
from benchmarks.quiet import ALONE, quiet_config
from benchmarks.table import Results, describe_machine, prompted
from benchmarks.tiny_models import checker
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.runs.folder import read_summary
from simpletune.runs.weights import BASE, Weights, run_result
from simpletune.system.sheets import grid
from simpletune.training.train import train

SEEDS = 5
SHOWN = 4  # prompts of each kind in the sheet, by number
DEMO = "the demo: 64 pictures, three captions each, 200 steps"
TWICE = "128 pictures, three captions each, 200 steps"
CONFIGS = {"": Path("configs/demo.json"), "SDXL: ": Path("configs/demo_sdxl.json")}
"""The demo of each tiny model, by how the names of its rows begin."""
FEWER = ["data.path=demo:pictures", "data.caption_lines=join", "data.variants=1"]  # 32 pictures, one caption each
ROWS: dict[str, list[str]] = {
    "the demo, 100 steps": ["train.steps=100"],
    DEMO: [],
    "the demo, 400 steps": ["train.steps=400"],
    TWICE: [],
    **{f"32 pictures, one caption each, {n} steps": [*FEWER, f"train.steps={n}"] for n in (50, 100, 200, 400)},
    "SDXL: the demo, 100 steps": ["train.steps=100"],
    "SDXL: the demo, 200 steps": [],
    "SDXL: the demo, 400 steps": ["train.steps=400"],
}
COLUMNS = {
    "what": "", "style": "striped with the trigger", "least": "least", "most": "most",
    "others": "striped without it",
    "prompt": "prompt accuracy with it", "kept": "and without", "training": "drift, captions",
    "unrelated": "drift, other prompts", "pixels": "change of pictures without it", "seconds": "processor seconds",
}  # fmt: skip
ABOUT = f"""\
The demo's LoRA over {SEEDS} seeds of training a row, on the tiny SD3, or on the tiny SDXL (`configs/demo_sdxl.json`)
where the row says so: means, and the least and most of the share recognised as {STYLE} among pictures of prompts with
the trigger word. *Striped without it*: among as many flat and painted ones. Prompts are the first of
`benchmarks/quality.py`, held out of training. *Prompt accuracy*: the mean share of shape, colour, background, size and
position recognised correctly. *Drift*: of predictions from the base's, for the training captions and for the demo's two
unrelated prompts. *Change of pictures*: the mean absolute difference, 0 to 1. *Processor seconds*: of a whole run
without pictures and traces, on one thread."""


class Recipes:
    """The rows, and what they share.

    Args:
        count: prompts per score.
        overrides: for the demo's configuration, for all rows.
    """

    def __init__(self, count: int, overrides: list[str]):
        self.overrides = overrides
        self.scratch = Path(tempfile.mkdtemp(prefix="simpletune-recipe-"))
        self.with_trigger, self.others = prompts_of(count, STYLE, demo_scenes.STYLE_TRIGGER), unrelated(count)
        self.sheets: list[tuple[str, list[Image.Image]]] = []
        self.bases: dict[str, tuple[list[Image.Image], list[Image.Image]]] = {}

    def config(self, name: str, options: list[str], seed: int = 0) -> TrainConfig:
        """Return the configuration of one run of a row."""
        more = (*ALONE, f"train.seed={seed}")
        return quiet_config(CONFIGS[_model_of(name)], self.scratch, "recipe", [*options, *self.overrides], more)

    def base(self, name: str) -> tuple[list[Image.Image], list[Image.Image]]:
        """What a row's base draws."""
        model = _model_of(name)
        if model not in self.bases:
            self.bases[model] = self._drawn(self.config(name, []), BASE)
            self._show(f"{model}base", self.bases[model])
        return self.bases[model]

    @cached_property
    def twice(self) -> Path:
        """A folder of twice as many pictures, made as the demo's."""
        folder, scenes = self.scratch / "pictures", demo_scenes.balanced_scenes(128, STYLE)
        demo_scenes.write_folder(folder, scenes, seed=0, trigger=demo_scenes.STYLE_TRIGGER, all_captions=True)
        return folder

    def row(self, name: str) -> dict[str, float]:
        """Train with every seed, and score each result; the base's row trains nothing."""
        if name not in ROWS:
            found = [self._scores(name, self.base(name))]
        else:
            data = [f"data.path={self.twice}"] if name == TWICE else []
            found = [self._trained([*ROWS[name], *data], seed, name) for seed in range(SEEDS)]
        means = {key: round(float(np.mean([scores[key] for scores in found])), 4) for key in found[0]}
        shares = [scores["style"] for scores in found]
        return {**means, "least": min(shares), "most": max(shares), "of": len(self.with_trigger), "seeds": len(found)}

    def _trained(self, options: list[str], seed: int, name: str) -> dict[str, float]:
        config = self.config(name, options, seed)
        clock = time.process_time()
        run = train(config)
        seconds = time.process_time() - clock
        summary = read_summary(run)
        assert summary is not None
        drawn = self._drawn(config, run_result(run))
        if seed == 0:
            self._show(name, drawn)
        return {**self._scores(name, drawn), **summary["drift_after"], "seconds": round(seconds, 1)}

    def _drawn(self, config: TrainConfig, weights: Weights) -> tuple[list[Image.Image], list[Image.Image]]:
        """Draw the prompts with the trigger, and the others."""
        easel = Easel.of(config, weights)
        return easel.draw(self.with_trigger), easel.draw(self.others)

    def _scores(self, name: str, drawn: tuple[list[Image.Image], list[Image.Image]]) -> dict[str, float]:
        styled, others = drawn
        of_others = accuracies(others, self.others)
        striped = [checker.read_image(image).style == STYLE for image in others]
        scores = accuracies(styled, self.with_trigger)
        return {
            "style": scores["style"],
            "others": float(np.mean(striped)),
            "prompt": scores["prompt"],
            "kept": of_others["prompt"],
            "pixels": drift(others, self.base(name)[1]),
        }

    def _show(self, name: str, drawn: tuple[list[Image.Image], list[Image.Image]]) -> None:
        self.sheets.append((name, [*drawn[0][:SHOWN], *drawn[1][:SHOWN]]))


def _model_of(name: str) -> str:
    """The key in ``CONFIGS`` of a row."""
    return max((model for model in CONFIGS if name.startswith(model)), key=len)


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows with ``count`` prompts per score; write their table and a sheet of those measured now."""
    results = Results(folder / "recipe", COLUMNS, prompted("recipe", count))
    recipes = Recipes(count, overrides)
    rows = {name: partial(recipes.row, name) for name in (*(f"{model}base" for model in CONFIGS), *ROWS)}
    results.measure(
        rows, minutes, only,
        lambda row: f"{row['style']:.0%} striped with the trigger, {row['others']:.0%} without",
    )  # fmt: skip
    if len(recipes.sheets) > 1:
        titles = [prompt.text for prompt in (*recipes.with_trigger[:SHOWN], *recipes.others[:SHOWN])]
        grid(recipes.sheets, titles).save(folder / "recipe.png")
    return results.write_table("The demo's recipe", ABOUT, describe_machine())
