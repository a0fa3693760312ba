"""``prior``: how far a class drifts while a run learns one subject of it, without and with prior preservation.

The base is the tiny SD3. The subject is the figure of configs/demo_subject.json, its class "figure".
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.quality import Easel, Prompt, drift, unrelated
from benchmarks.table import Results, describe_machine
from benchmarks.tiny_models import checker
from simpletune.commands.train.train import train
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import pictures
from simpletune.runs.weights import BASE, Weights, run_result
from simpletune.system.console import say
from simpletune.system.sheets import grid

CONFIG = Path("configs/demo_subject.json")
SUBJECT, CLASS = f"{pictures.SUBJECT_TRIGGER} figure", "figure"
NAMED = [f"prior.prompt={CLASS}", f"prior.trigger={SUBJECT}"]
PICTURES = [
    "prior.method=class_pictures", *NAMED, "prior.count=60", "prior.guidance=3", "prior.steps=12", "data.repeats=12",
]  # fmt: skip
ROWS: dict[str, list[str]] = {
    "without, 30 steps": ["train.steps=30"],
    "without, 160 steps": ["train.steps=160"],
    "base's prediction, 160 steps": ["train.steps=160", "prior.method=base_prediction", *NAMED],
    "class pictures, 320 steps": ["train.steps=320", *PICTURES],
    "class pictures, 640 steps": ["train.steps=640", *PICTURES],
}
SEEDS = 2
READ_AS = ("ring", "purple")  # what the checker reads in every picture of the subject that `pictures` draws
PLACED = ("background", "size", "position")
COLUMNS = {
    "what": "", "steps": "steps", "fidelity": "subject fidelity", "class_drift": "class drift",
    "class_fidelity": "likeness of the class to the subject", "drift": "drift of other prompts",
}  # fmt: skip
ABOUT = f"""\
The demo's figure (a yellow star on a purple disc) learned from 5 pictures as in `configs/demo_subject.json`, means over
{SEEDS} seeds of training. *Subject fidelity*: of pictures of "{SUBJECT}" on backgrounds and at places that are mostly
new, 1 minus the mean absolute difference from the figure drawn there, as a share of that of an empty background; 1 is
exact, 0 as good as empty. *Class drift*: mean absolute difference, 0 to 1, from the base's picture from the same noise,
for the same prompts with "{CLASS}" in place of "{SUBJECT}". *Likeness*: the fidelity of these pictures, which prior
preservation should leave at the base's. Class pictures are half of the samples. Compare rows of equal subject fidelity:
each schedule ends with its run, so a shorter one is no earlier checkpoint of a longer one."""


def prompts_of(count: int, name: str) -> list[Prompt]:
    """Create prompts for figures of a name, on various backgrounds, at various places."""
    scenes = [
        pictures.Scene("circle", "purple", background, size, position, "flat")
        for background in ("cream", "lavender", "white", "sky")
        for position in pictures.POSITIONS
        for size in pictures.SIZES
    ]
    chosen = np.random.default_rng(3).permutation(len(scenes))[:count]
    return [Prompt(_text(scenes[index], name), scenes[index], 500 + row) for row, index in enumerate(chosen)]


def _text(scene: pictures.Scene, name: str) -> str:
    of_subject = pictures.SUBJECT_TEMPLATE.format(
        size=scene.size, subject=pictures.SUBJECT_TRIGGER, position=scene.position, background=scene.background
    )
    return of_subject.replace(SUBJECT, name)


def fidelity(images: list[Image.Image], prompts: list[Prompt]) -> float:
    """1 minus the mean absolute difference from the subject, as a share of that of an empty background."""
    shares = []
    for image, prompt in zip(images, prompts, strict=True):
        scene = prompt.scene
        subject = np.asarray(pictures.draw_subject(scene.background, scene.size, scene.position), float)
        empty = np.full_like(subject, pictures.BACKGROUNDS[scene.background])
        shares.append(1 - np.abs(np.asarray(image, float) - subject).mean() / np.abs(empty - subject).mean())
    return float(np.mean(shares))


def read_shares(images: list[Image.Image], prompts: list[Prompt]) -> tuple[float, float]:
    """Score pictures of the subject by the demo's checker.

    Returns:
        The share read as the checker reads the subject itself (the star leaves a hole in the disc), and the mean share
        of background, size and position read as asked.
    """
    readings = [checker.read_picture(image) for image in images]
    scores = checker.score(images, [prompt.scene for prompt in prompts])
    alike = [(reading.shape, reading.colour) == READ_AS for reading in readings]
    return float(np.mean(alike)), float(np.mean([scores[name] for name in PLACED]))


class Priors:
    """The rows and the pictures of the base that they share.

    Args:
        count: prompts per score.
        overrides: for the configuration, for all rows.
    """

    def __init__(self, count: int, overrides: list[str]):
        self.overrides = overrides
        self.scratch = Path(tempfile.mkdtemp(prefix="simpletune-prior-"))
        self.subject, self.class_ = prompts_of(count, SUBJECT), prompts_of(count, CLASS)
        self.others = unrelated(count)
        self.base = self._drawn(self.config([], 0), BASE)
        self.sheets: list[tuple[str, list[Image.Image]]] = [("base", self._shown(self.base))]

    def config(self, options: list[str], seed: int) -> TrainConfig:
        """Return the configuration of one run."""
        places = [f"output.runs={self.scratch}/runs", f"output.profiles={self.scratch}/profiles"]
        quiet = ["profile.max_traces=0", "validation.prompts=[]", "validation.loss_samples=0", "output.report=false"]
        quiet += [
            "tracking.tensorboard=false",
            "checkpoint.every=null",
            f"train.seed={seed}",
            "device=cpu",
            "name=prior",
        ]
        return read_config(CONFIG, [*options, *self.overrides, *places, *quiet])[0]

    def row(self, name: str, options: list[str]) -> dict[str, float]:
        """Train with several seeds and score each result."""
        found = []
        for seed in range(SEEDS):
            config = self.config(options, seed)
            drawn = self._drawn(config, run_result(train(config)))
            found.append(self._scores(drawn))
            if seed == 0:
                self.sheets.append((name, self._shown(drawn)))
        means = {key: round(float(np.mean([scores[key] for scores in found])), 4) for key in found[0]}
        return {"steps": config.steps(1), **means, "of": len(self.subject)}

    def base_row(self) -> dict[str, float]:
        """Score the base."""
        return {key: round(value, 4) for key, value in self._scores(self.base).items()} | {"of": len(self.subject)}

    def _scores(self, drawn: tuple[list[Image.Image], ...]) -> dict[str, float]:
        subject, class_, others = drawn
        return {
            "fidelity": fidelity(subject, self.subject),
            "class_drift": drift(class_, self.base[1]),
            "class_fidelity": fidelity(class_, self.class_),
            "drift": drift(others, self.base[2]),
        }

    def _drawn(self, config: TrainConfig, weights: Weights) -> tuple[list[Image.Image], ...]:
        """Draw the prompts of the subject, of the class, and the others."""
        easel = Easel(resolve_folders(config), weights, torch.device("cpu"))
        return tuple(easel.draw(prompts) for prompts in (self.subject, self.class_, self.others))

    @staticmethod
    def _shown(drawn: tuple[list[Image.Image], ...]) -> list[Image.Image]:
        subject, class_, _ = drawn
        return [*subject[-4:], *class_[-4:]]


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows; write ``prior.json``, ``prior.md`` and, of the rows measured now, ``prior.png``.

    Args:
        folder: for the results.
        count: prompts per score.
        minutes: start no row after this many.
        only: text that row names must contain.
        overrides: for the configuration.

    Returns:
        The Markdown table.
    """
    results = Results(folder / "prior", COLUMNS)
    priors = Priors(count, overrides)
    rows: dict[str, list[str] | None] = {"base": None, **ROWS}
    for name, options in results.missing(rows, minutes, only):
        row = priors.base_row() if options is None else priors.row(name, options)
        say(f"bench   {name}: fidelity {row['fidelity']:.3f}, class drift {row['class_drift']:.4f}")
        results.add(name, row)
    if len(priors.sheets) > 1:
        titles = [*[SUBJECT] * 4, *[CLASS] * 4]
        grid(priors.sheets, titles).save(folder / "prior.png")
    return results.write_table("Prior preservation on the tiny SD3", ABOUT, describe_machine())
