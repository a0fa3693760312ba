"""Draw docs/images/methods_grid.png (``make pictures``): what each method makes of the demo's style, with the same
prompts from the same noise.

    python -m benchmarks.methods_grid [FOLDER]

Trains the tiny model once by each method, as ``configs/demo.json`` with the settings below, and draws with all of them
by ``simpletune compare``. FOLDER keeps the runs (default: none).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from simpletune.apps.cli.main import main as simpletune
from simpletune.config.load import read_json
from simpletune.system.options import Json
from simpletune.system.sheets import grid

IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "methods_grid.png"
TARGETS = read_json(Path("demo"))["adapter"]["targets"]
WORD: Json = {"token": "glim", "initial": "flat", "vectors": 2, "place": "input", "learning_rate": 0.02}
METHODS: dict[str, Json] = {  # sections that differ from the demo's
    "LoRA": {},
    "LoKr": {"adapter": {"method": "lokr", "factor": 4, "rank": None, "targets": TARGETS}},
    "DoRA": {"adapter": {"method": "dora", "rank": 8, "targets": TARGETS}},
    "full": {
        "adapter": {"method": "full"},
        "precision": {"weights": "bf16"},
        "optimizer": {"name": "adamw", "lr": 0.0005},
    },
    "embeddings": {"adapter": {"method": "none"}, "text": {"embeddings": WORD}},
}
PROMPTS = {
    "purple cross, glim": "large purple cross, sky background, at the bottom, glim style",
    "orange circle, glim": "a medium orange circle on the right of a gray picture in glim style",
    "red circle, flat": "a flat picture of a large red circle at the bottom, on a white background",
}


def words_of(name: str, folder: Path) -> list[str]:
    """Return what changes the demo's configuration for a method."""
    sections = [f"{section}={json.dumps(value)}" for section, value in METHODS[name].items()]
    return [f"name={name}", f"output.runs={folder}", "validation.prompts=[]", "profile.max_traces=0", *sections]


def draw(folder: Path) -> None:
    """Train by each method in a folder, and draw the grid."""
    rows: dict[str, list[Image.Image]] = {"base": []}
    prompts = [word for prompt in PROMPTS.values() for word in ("--prompt", prompt)]
    for name in METHODS:
        run, drawn = folder / name, folder / f"{name}-drawn"
        if not (run / "summary.json").exists() and simpletune(["train", "demo", *words_of(name, folder)]):
            raise SystemExit(f"{name} was not trained")
        shutil.rmtree(drawn, ignore_errors=True)
        # One by one: beside embeddings of a word, the other models would read the words that these began as.
        if simpletune(["compare", str(run), *prompts, "--seed", "3", "--out", str(drawn)]):
            raise SystemExit(f"nothing was drawn with {name}")
        for model in (each for each in drawn.iterdir() if each.is_dir()):
            images: list[Image.Image] = [Image.open(file) for file in sorted(model.iterdir())]
            rows["base" if model.name == "base" else name] = images
    grid(list(rows.items()), list(PROMPTS)).save(IMAGE, optimize=True)
    print(IMAGE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw(Path(sys.argv[1] if sys.argv[1:] else made))
