"""Fine-tune the tiny SD3, judge its checkpoints by its encoders and by its checker, and chart the results."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from PIL import Image

from benchmarks.quality import Easel, Prompt, file_name, write_strip
from benchmarks.quiet import QUIET, quiet_config
from benchmarks.table import Results
from benchmarks.tiny_models import checker
from simpletune.apps.cli.main import main as simpletune
from simpletune.commands.evaluate.missing_images import FOLDER
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import ENCODERS, demo_scenes
from simpletune.runs.folder import read_scores
from simpletune.runs.report.charts import image
from simpletune.runs.weights import BASE, run_result
from simpletune.system.options import Json, UserError
from simpletune.system.sheets import grid
from simpletune.training.train import train

DINO, CLIP = (name.removeprefix("demo:") for name in ENCODERS)
"""Titles of the demo's encoders: pictures; pictures and prompts."""
MORE = (*QUIET, "validation.every=null", "output.report=false")
FIDELITIES = {"subject": ("subject_fidelity", DINO), "prompt": ("prompt_fidelity", CLIP)}


SUBJECT = f"{demo_scenes.SUBJECT_TRIGGER} figure"
READ_AS = ("ring", "purple")  # what the checker reads in every picture of the subject that `pictures` draws
PLACED = ("background", "size", "position")


@dataclass(frozen=True)
class Tuned:
    """A finished run.

    Args:
        folder: of the run.
        config: of the run.
        seconds: of processor time that training took, from the start of the process's part to its result.
    """

    folder: Path
    config: TrainConfig
    seconds: float


class Studio:
    """Trains and judges runs in a folder.

    Args:
        file: the configuration.
        overrides: of it, for all runs.
    """

    def __init__(self, file: Path, overrides: Sequence[str]):
        self.file, self.overrides = file, list(overrides)
        self.scratch = Path(tempfile.mkdtemp(prefix="simpletune-judged-"))
        self.base = self.scratch / "base"  # pictures of the base, which all runs share

    def config(self, options: Sequence[str], name: str) -> TrainConfig:
        """Return the configuration of one run."""
        settings = ["checkpoint.keep_last=all", *options, *self.overrides]
        return quiet_config(self.file, self.scratch, name, settings, MORE)

    def tuned(self, options: Sequence[str], name: str) -> Tuned:
        """Fine-tune once."""
        config = self.config(options, file_name(name))
        clock = time.process_time()
        folder = train(config)
        return Tuned(folder, config, time.process_time() - clock)

    def fidelity(self, run: Tuned, seeds: int) -> dict[int, Json]:
        """Evaluate a run with the demo's encoders; the base's pictures are drawn once for all runs of a precision.

        Returns:
            Subject and prompt fidelity by step, 0 for the base, each with the width of half its 95% interval.

        Raises:
            UserError: the evaluation failed.
        """
        kept = self.base / run.config.precision.weights
        if kept.exists():
            shutil.copytree(kept, run.folder / FOLDER)
        if simpletune(["evaluate", str(run.folder), "--seeds", str(seeds)]):
            raise UserError(f"{run.folder} could not be evaluated: its message is above")
        if not kept.exists():
            shutil.copytree(run.folder / FOLDER, kept)
        found = read_scores(run.folder)
        assert found is not None
        return {point["step"] or 0: fidelities_of(point) for point in found["points"]}

    def at(self, run: Tuned, step: int) -> Easel:
        """Load the base (0) or a checkpoint for drawing."""
        return Easel.of(run.config, BASE if step == 0 else run_result(run.folder, step=step))


def subject_prompts(count: int) -> list[Prompt]:
    """Create prompts for the demo's subject, on various backgrounds, at various places."""
    scenes = [
        demo_scenes.Scene("circle", "purple", background, size, position, "flat")
        for background in ("cream", "lavender", "white", "sky")
        for position in demo_scenes.POSITIONS
        for size in demo_scenes.SIZES
    ]
    chosen = [scenes[index] for index in np.random.default_rng(3).permutation(len(scenes))[:count]]
    template, name = demo_scenes.SUBJECT_TEMPLATE, demo_scenes.SUBJECT_TRIGGER
    texts = [template.format(size=s.size, subject=name, position=s.position, background=s.background) for s in chosen]
    return [Prompt(text, scene, 500 + row) for row, (text, scene) in enumerate(zip(texts, chosen, strict=True))]


def read_shares(images: list[Image.Image], prompts: list[Prompt]) -> tuple[float, float]:
    """Score pictures of the subject by the demo's checker.

    Returns:
        The share read as the checker reads the subject itself (the star leaves a hole in the disc), and the mean share
        of background, size and position read as asked.
    """
    readings = [checker.read_image(image) for image in images]
    scores = checker.score(images, [prompt.scene for prompt in prompts])
    alike = [(reading.shape, reading.colour) == READ_AS for reading in readings]
    return float(np.mean(alike)), float(np.mean([scores[name] for name in PLACED]))


def fidelities_of(point: Json) -> Json:
    """Read subject and prompt fidelity of one model, and half the width of their intervals."""
    found: Json = {}
    for name, (score, encoder) in FIDELITIES.items():
        value = point["scores"][score][encoder]
        found |= {name: value["value"], f"{name}_half": round((value["high"] - value["low"]) / 2, 4)}
    return found


def means(points: Sequence[Json], keys: Sequence[str]) -> Json:
    """Average values over runs; with several runs, add maximum minus minimum as ``KEY_range``."""
    found: Json = {}
    for key in keys:
        values = [point[key] for point in points]
        found[key] = round(fmean(values), 4)
        if len(values) > 1:
            found[f"{key}_range"] = round(max(values) - min(values), 4)
    return found


def lacking(rows: Iterable[str], found: Container[str]) -> list[str]:
    """Lines that name the rows still to be measured; empty if none is missing."""
    left = [name for name in rows if name not in found]
    return ["", f"Not measured yet: {'; '.join(left)}."] if left else []


def write_page(results: Results, lines: Sequence[str], rows: Iterable[str]) -> Path:
    """Write a page of results, and at its end the rows that they lack."""
    file = results.stem.with_suffix(".md")
    file.write_text("\n".join([*lines, *lacking(rows, results.rows)]) + "\n", encoding="utf-8")
    return file


def strip(easel: Easel, prompts: Sequence[Prompt], file: Path) -> None:
    """Draw prompts side by side into a file."""
    write_strip(easel.draw(prompts), file)


def sheet_of(strips: Sequence[tuple[str, Path]], file: Path) -> None:
    """Arrange the strips that exist on one sheet, with the prompts' numbers above."""
    rows: list[tuple[str, list[Image.Image]]] = []
    for title, path in strips:
        if path.exists():
            with Image.open(path) as whole:
                boxes = [(left, 0, left + 64, 64) for left in range(0, whole.width, 64)]
                rows.append((title, [whole.convert("RGB").crop(box) for box in boxes]))
    if rows:
        columns = [f"prompt {number + 1}" for number in range(max(len(images) for _, images in rows))]
        grid(rows, columns).save(file)


def chart(file: Path, panels: Sequence[Json]) -> None:
    """Draw Vega-Lite panels side by side into a PNG file."""
    spec = {"hconcat": list(panels), "resolve": {"scale": {"color": "independent"}},
            "config": {"title": {"anchor": "start"}}}  # fmt: skip
    file.write_bytes(image(spec))


def path_panel(title: str, points: Sequence[Json], axes: tuple[str, str]) -> Json:
    """A panel of paths through (x, y) in the order of steps, labelled by step.

    Args:
        title: of the panel.
        points: with ``run``, ``step``, ``x`` and ``y``, and the interval of y from ``low`` to ``high`` if it is known.
        axes: titles of x and y.
    """
    x = {"field": "x", "type": "quantitative", "title": axes[0], "scale": {"zero": False}}
    y = {"field": "y", "type": "quantitative", "title": axes[1], "scale": {"zero": False}}
    colour = {"field": "run", "type": "nominal", "title": None, "legend": {"orient": "bottom"}}
    order = {"field": "step", "type": "quantitative"}
    interval, known = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}, all("low" in point for point in points)
    return {
        "title": title, "width": 360, "height": 260, "data": {"values": list(points)},
        "encoding": {"x": x, "y": y},
        "layer": [
            *([{"mark": {"type": "rule", "opacity": 0.35}, "encoding": {"color": colour, **interval}}] * known),
            {"mark": {"type": "line", "point": True}, "encoding": {"color": colour, "order": order}},
            {"mark": {"type": "text", "dy": -9, "fontSize": 9}, "encoding": {"text": {"field": "step"}}},
        ],
    }  # fmt: skip
