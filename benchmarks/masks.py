"""``masks``: show that training with masks does not teach the background, on the tiny SD3 with its own checker.

Five pictures show one figure, all on the same background, which the captions do not mention: without masks, the
figure's name comes to mean the background, too.
"""

from __future__ import annotations

import tempfile
import time
from itertools import cycle
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.quality import Easel, Prompt
from benchmarks.table import Results, describe_machine
from benchmarks.tiny_models import checker
from simpletune.commands.train.train import train
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import pictures
from simpletune.runs.weights import BASE, Weights, run_result
from simpletune.system.console import say
from simpletune.system.devices import choose_device
from simpletune.system.sheets import grid

CONFIG = Path("configs/demo_subject.json")
BACKGROUND = "mint"
NEAR = 60.0  # distance in RGB, out of 255 per channel, within which a pixel has a colour
LEAST = 0.004  # share of pixels in each of the figure's two colours from which the figure is there
ROWS: dict[str, list[str] | None] = {
    "base": None,
    "without masks": [],
    "masks, 0.1 outside": ["data.mask=files", "data.unmasked_weight=0.1"],
    "masks, 0 outside": ["data.mask=files", "data.unmasked_weight=0"],
}
COLUMNS = {
    "what": "", "pull": "pull where a background is asked for", "free": "pull where none is",
    "asked": "the background that is asked for", "figure": "the figure is there", "seconds": "seconds of training",
}  # fmt: skip
ABOUT = f"""\
`python -m benchmarks masks`: 5 pictures of the demo's figure, all on a {BACKGROUND} background, with captions that do
not mention it ("a small blick figure in the middle"); a mask of each picture covers its figure. LoRA as in
`{CONFIG}`, drawn in 12 steps at guidance 3, one seed per prompt, base and result from the same noise. *Pull*: how far
the background moved from the base's towards {BACKGROUND}, as a share of the way, mean over the pictures: 0 is the
base's background, 1 the one of the training pictures. *The background that is asked for*: share of pictures, read by
the demo's checker. *The figure is there*: share of pictures with both of its colours."""


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


def ground(image: Image.Image) -> np.ndarray:
    """The colour of a picture's background: the median of its outermost 2 pixels, [3]."""
    pixels = np.asarray(image.convert("RGB"), float)
    edge = np.ones(pixels.shape[:2], bool)
    edge[2:-2, 2:-2] = False
    return np.asarray(np.median(pixels[edge], axis=0))


def pull(images: list[Image.Image], base: list[Image.Image]) -> float:
    """How far backgrounds moved from the base's (0) to the training pictures' (1)."""
    shares = []
    for image, before in zip(images, base, strict=True):
        way = np.array(pictures.BACKGROUNDS[BACKGROUND], float) - ground(before)
        shares.append((ground(image) - ground(before)) @ way / (way @ way))
    return float(np.mean(shares))


class Measured:
    """The rows' data, and the base's pictures for comparison.

    Args:
        scratch: a folder for pictures and runs.
        count: prompts per score.
    """

    def __init__(self, scratch: Path, count: int):
        self.scratch, self.count = scratch, count
        write_data(scratch / "data")
        self.base: tuple[list[Image.Image], list[Image.Image]] = self._draw(self.config([]), BASE)

    def config(self, options: list[str]) -> TrainConfig:
        """The demo's configuration with changes; runs and traces go to the scratch folder."""
        data = self.scratch / "data"
        places = [f"output.runs={self.scratch}/runs", f"output.profiles={self.scratch}/profiles"]
        places += [f"data.path={data}/pictures"]
        places += [f"data.mask_path={data}/masks"] if "data.mask=files" in options else []
        quiet = ["profile.max_traces=0", "validation.prompts=[]", "tracking.tensorboard=false", "name=masks"]
        return read_config(CONFIG, [*options, *places, *quiet])[0]

    def _draw(self, config: TrainConfig, weights: Weights) -> tuple[list[Image.Image], list[Image.Image]]:
        """Draw the prompts with a background and those without."""
        device, _ = choose_device(config.device, config.precision.compute, config.is_demo)
        easel = Easel(resolve_folders(config), weights, device)
        return easel.draw(prompts_of(self.count, True)), easel.draw(prompts_of(self.count, False))

    def row(self, options: list[str] | None) -> tuple[dict[str, float], list[Image.Image]]:
        """Train one row, or take the base, and score it; returns the figures and the first pictures of both kinds."""
        (asked, free), trained = self.base, dict[str, float]()
        if options is not None:
            config, clock = self.config(options), time.perf_counter()
            run = train(config)
            trained = {"seconds": round(time.perf_counter() - clock, 1)}
            asked, free = self._draw(config, run_result(run))
        scenes = [prompt.scene for prompt in prompts_of(self.count, True)]
        figures = {
            "pull": pull(asked, self.base[0]),
            "free": pull(free, self.base[1]),
            "asked": checker.score(asked, scenes)["background"],
            "figure": float(np.mean([has_figure(image) for image in [*asked, *free]])),
        }
        return {**figures, **trained, "of": self.count}, [*asked[:3], *free[:3]]


def run(folder: Path, count: int, minutes: float, only: str) -> Path:
    """Measure missing rows; write ``masks.json``, ``masks.md`` and a contact sheet.

    Args:
        folder: for the results.
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
        measured = Measured(Path(place), count)
        for name, options in results.missing(ROWS, minutes, only):
            row, shown = measured.row(options)
            say(f"bench   {name}: pull {row['pull']:.2f} with a background asked for, {row['free']:.2f} without")
            results.add(name, row)
            sheets.append((name, shown))
    if sheets:
        folder.mkdir(parents=True, exist_ok=True)
        grid(sheets, ["background asked for"] * 3 + ["none asked for"] * 3).save(folder / "masks.png")
    return results.write_table("Masks on the tiny SD3", ABOUT, describe_machine())
