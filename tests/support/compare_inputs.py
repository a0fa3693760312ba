"""Write what the rows of ``make compare`` read: tiny models, and pictures with captions, masks and shapes.

A program of its own, run once per comparison with one tree's code, because both trees must read the same files.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tiny_sd15
import tiny_sdxl
from PIL import Image, ImageDraw

from benchmarks.tiny_models import tiny_klein, tiny_qwen_image, tiny_sd3, tiny_zimage
from simpletune.data.demo import demo_scenes

SIDE = 64
SHAPES = [(64, 64), (96, 32), (32, 96)]  # three buckets


def write(folder: Path) -> None:
    """Write everything into a folder, which must not exist."""
    folder.mkdir()
    tiny_sd3.build(folder / "sd3", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=1, dtype="fp32")
    tiny_sd15.build(folder / "sd15", "sd15", seed=1)
    tiny_sd15.build(folder / "sd2", "sd2", seed=1)
    tiny_sdxl.build(folder / "sdxl", seed=1)
    tiny_klein.build(folder / "klein", seed=1)
    tiny_zimage.build(folder / "zimage", seed=1)
    tiny_qwen_image.build(folder / "qwen_image", seed=1)
    for name, style, seed in (("flat", "flat", 3), ("striped", "striped", 4), ("masked", "flat", 5)):
        demo_scenes.write_folder(folder / name, demo_scenes.sample_scenes(6, seed, style=style), seed=seed, pixels=SIDE)
    (folder / "masks").mkdir()
    masked = sorted((folder / "masked").glob("*.png"))
    for number, file in enumerate(masked):
        _mask(file, number, folder / "masks" / file.name)
    rows = [_row(file) for file in masked]
    for name, parts in (("table", 1), ("shards", 3)):
        (folder / name).mkdir()
        for part in range(parts):
            table = pa.Table.from_pylist(rows[part::parts])
            pq.write_table(table, folder / name / f"train-{part:05d}-of-{parts:05d}.parquet", row_group_size=2)


def _mask(file: Path, number: int, mask: Path) -> None:
    """Give a picture its bucket's shape and an opaque left half, and write a mask of its upper half."""
    size = SHAPES[number % len(SHAPES)]
    alpha, upper = Image.new("L", size, 0), Image.new("L", size, 0)
    ImageDraw.Draw(alpha).rectangle((0, 0, size[0] // 2 - 1, size[1] - 1), fill=255)
    ImageDraw.Draw(upper).rectangle((0, 0, size[0] - 1, size[1] // 2 - 1), fill=255)
    image = Image.open(file).convert("RGB").resize(size)
    image.putalpha(alpha)
    image.save(file)
    upper.save(mask)


def _row(file: Path) -> dict[str, object]:
    """A picture and its caption as Hugging Face lays them out, with the size."""
    width, height = Image.open(file).size
    image = {"bytes": file.read_bytes(), "path": file.name}
    return {"image": image, "text": file.with_suffix(".txt").read_text().strip(), "width": width, "height": height}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(json.dumps(sorted(entry.name for entry in Path(sys.argv[1]).iterdir())))
