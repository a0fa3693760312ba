"""``masks``: show that training with masks does not teach the background, on the tiny SD3 with its own checker.

Five pictures of one figure, all on the same background, with captions that do not mention it: without masks, the
figure's name comes to mean the background, too.
"""

from __future__ import annotations

import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.quality import Easel, Prompt
from benchmarks.table import Results, describe_machine
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.demo import checker, pictures
from simpletune.runs.weights import BASE, result_of
from simpletune.sheets import grid
from simpletune.system.console import say
from simpletune.system.devices import choose_device
from simpletune.training.loop import train

CONFIG = Path("configs/demo_subject.json")
BACKGROUND = "lavender"
NEAR = 60.0  # distance in RGB, out of 255 per channel, within which a pixel has a colour
LEAST = 0.004  # share of pixels in each of the figure's two colours from which the figure is there
ROWS: dict[str, list[str] | None] = {
    "base": None,
    "without masks": [],
    "masks, 0.1 outside": ["data.mask=files", "data.unmasked_weight=0.1"],
    "masks, 0 outside": ["data.mask=files", "data.unmasked_weight=0"],
}
COLUMNS = {
    "what": "", "leaked": f"{BACKGROUND} where no background is asked for", "asked": "the background that is asked for",
    "instead": f"{BACKGROUND} instead of it", "figure": "the figure is there", "seconds": "seconds of training",
}  # fmt: skip
ABOUT = f"""\
`python -m benchmarks masks`: 5 pictures of the demo's figure, all on a {BACKGROUND} background, with captions that do
not mention it ("a small blick figure in the middle"); a mask of each picture covers its figure. LoRA of
`{CONFIG}` (150 steps of 5 pictures), drawn in 12 steps at guidance 3, one seed per prompt. Shares of pictures: the
background is read by the demo's checker; *the figure is there* if both of its colours are."""


def write_data(folder: Path) -> None:
    """Write pictures, captions and masks."""
    places = zip(pictures.POSITIONS, cycle(pictures.SIZES), strict=False)
    (folder / "masks").mkdir(parents=True)
    (folder / "pictures").mkdir()
    for number, (position, size) in enumerate(places):
        figure = pictures.draw_subject(BACKGROUND, size, position, seed=number)
        apart = np.abs(np.asarray(figure, float) - np.array(pictures.BACKGROUNDS[BACKGROUND])).max(axis=2) > 16
        figure.save(folder / "pictures" / f"{number:03d}.png")
        Image.fromarray(np.where(apart, 255, 0).astype(np.uint8)).save(folder / "masks" / f"{number:03d}.png")
        text = f"a {size} {pictures.SUBJECT_TRIGGER} figure {position}"
        (folder / "pictures" / f"{number:03d}.txt").write_text(text, encoding="utf-8")


def prompts_of(count: int, with_background: bool) -> list[Prompt]:
    """Prompts for the figure, on a background other than that of its pictures or without mention of any."""
    backgrounds = [name for name in pictures.BACKGROUNDS if name != BACKGROUND]
    found = []
    for number in range(count):
        size = list(pictures.SIZES)[number % 3]
        position, background = list(pictures.POSITIONS)[number % 5], backgrounds[number % len(backgrounds)]
        text = f"a {size} {pictures.SUBJECT_TRIGGER} figure {position}"
        text += f", on a {background} background" if with_background else ""
        scene = pictures.Scene("circle", "purple", background, size, position, "flat")
        found.append(Prompt(text, scene, 500 + number))
    return found


def has_figure(image: Image.Image) -> bool:
    """Whether a picture shows both colours of the figure."""
    pixels = np.asarray(image.convert("RGB"), float)
    colours = (np.array(pictures.COLOURS[name], float) for name in ("purple", "yellow"))
    return all((np.linalg.norm(pixels - colour, axis=2) < NEAR).mean() > LEAST for colour in colours)


def score(easel: Easel, count: int) -> tuple[dict[str, float], list[Image.Image]]:
    """Draw and score; returns the figures and the first pictures of both kinds."""
    asked, free = prompts_of(count, True), prompts_of(count, False)
    drawn, plain = easel.draw(asked), easel.draw(free)
    grounds = [checker.read(image).background for image in drawn]
    figures = {
        "leaked": float(np.mean([checker.read(image).background == BACKGROUND for image in plain])),
        "asked": float(np.mean([ground == p.scene.background for ground, p in zip(grounds, asked, strict=True)])),
        "instead": float(np.mean([ground == BACKGROUND for ground in grounds])),
        "figure": float(np.mean([has_figure(image) for image in [*drawn, *plain]])),
    }
    return figures, [*drawn[:3], *plain[:3]]


def measure(
    options: list[str] | None, data: Path, scratch: Path, count: int
) -> tuple[dict[str, Any], list[Image.Image]]:
    """Train one row, or take the base, and score it."""
    places = [f"output.runs={scratch}/runs", f"output.profiles={scratch}/profiles", f"data.path={data}/pictures"]
    places += [f"data.mask_path={data}/masks"] if "data.mask=files" in (options or []) else []
    quiet = ["profile.max_traces=0", "validation.prompts=[]", "tracking.tensorboard=false", "name=masks"]
    config: TrainConfig = read_config(CONFIG, [*(options or []), *places, *quiet])[0]
    clock, weights = time.perf_counter(), BASE
    if options is not None:
        weights = result_of(train(config))
    seconds = round(time.perf_counter() - clock, 1)
    device, _ = choose_device(config.device, config.precision.compute, config.is_demo)
    figures, shown = score(Easel(resolve_folders(config), weights, device), count)
    return {**figures, "seconds": seconds if options is not None else None, "of": count}, shown


def run(folder: Path, count: int, minutes: float, only: str) -> Path:
    """Measure missing rows; write ``masks.json``, ``masks.md`` and a contact sheet.

    Args:
        folder: of the results.
        count: prompts per score.
        minutes: start no row after this many.
        only: text that row names must contain.

    Returns:
        The Markdown table.

    Raises:
        UserError: no row name contains ``only``.
    """
    results, sheets = Results(folder / "masks", COLUMNS), []
    with tempfile.TemporaryDirectory(prefix="simpletune-masks-") as place:
        scratch, data = Path(place), Path(place) / "data"
        write_data(data)
        for name, options in results.missing(ROWS, minutes, only):
            row, shown = measure(options, data, scratch, count)
            say(
                f"bench   {name}: {BACKGROUND} {row['leaked']:.2f} without, {row['instead']:.2f} with another asked for"
            )
            results.add(name, row)
            sheets.append((name, shown))
    if sheets:
        folder.mkdir(parents=True, exist_ok=True)
        grid(sheets, ["background asked for"] * 3 + ["none asked for"] * 3).save(folder / "masks.png")
    return results.write_table("Masks on the tiny SD3", ABOUT, describe_machine())
