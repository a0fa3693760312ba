"""Write what the rows of ``benchmarks/field_values.py`` read: the inputs of ``make compare``, and folders and files for
the fields that those do not concern.

A program of its own, as ``compare_inputs.py``.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import compare_inputs
import pyarrow.parquet as pq
import stream_data
import tiny_unets
from PIL import Image, ImageDraw, ImageOps

from benchmarks.tiny_models import tiny_klein, tiny_qwen_image, tiny_sd3, tiny_zimage


def write(folder: Path) -> None:
    """Write everything into a folder, which must not exist."""
    compare_inputs.write(folder)
    tiny_sd3.build(folder / "sd3_other", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=2, dtype="fp32")
    for version in ("sd15", "sd2", "sdxl"):
        shutil.rmtree(folder / version)
        tiny_unets.build_pipeline(folder / version, version, seed=1)
    for version in ("sd15", "sdxl"):
        tiny_unets.build_pipeline(folder / f"{version}_other", version, seed=2)
    tiny_klein.build(folder / "klein_other", seed=2)
    tiny_zimage.build(folder / "zimage_other", seed=2)
    tiny_qwen_image.build(folder / "qwen_image_other", seed=2)
    _folders(folder)
    _tables(folder)
    hole = Image.new("L", (64, 64), 0)
    ImageDraw.Draw(hole).rectangle((0, 0, 20, 20), fill=255)
    hole.save(folder / "hole.png")


def _folders(folder: Path) -> None:
    """Folders of pictures that one field reads otherwise than another."""

    def copied(name: str, source: str = "flat") -> tuple[Path, list[Path]]:
        made = Path(shutil.copytree(folder / source, folder / name))
        return made, sorted(made.glob("*.png"))

    _, files = copied("tags")
    for file in files:
        file.with_suffix(".txt").write_text("one, two; three, four, five; six")
    made, files = copied("named")
    for file in files:
        file.with_suffix(".txt").rename(made / f"red heart {file.stem}.txt")
        file.rename(made / f"red heart {file.stem}.png")
    _, files = copied("lines")
    for file in files:
        file.with_suffix(".txt").write_text("first line\nsecond line\n")
    _, files = copied("sizes")
    for file in files[:3]:
        Image.open(file).resize((128, 128)).save(file)
    _, files = copied("broken")
    files[0].write_bytes(files[0].read_bytes()[:100])
    made, files = copied("any_form")
    files[0].rename(made / "000.PNG")
    files[1].with_suffix(".txt").rename(made / f"{files[1].name}.txt")
    _, files = copied("uncaptioned")
    for file in files[:2]:
        file.with_suffix(".txt").unlink()
    made, files = copied("split")
    kohya, _ = copied("kohya")
    for name, place, chosen in (("train", made, (0, 1, 2)), ("test", made, (3, 4, 5)), ("3_red dog", kohya, (0, 1))):
        (place / name).mkdir()
        for number in chosen:
            for each in sorted(place.glob(f"{number:03}.*")):
                each.rename(place / name / each.name)
    made, files = copied("linked")
    for number, each in enumerate(sorted((folder / "striped").glob("*.png"))[:2]):
        (made / f"1{number:02}.png").symlink_to(each)
        (made / f"1{number:02}.txt").write_text("a linked picture")
    made, files = copied("beside", "masked")
    for file in files:
        mask = Image.new("L", Image.open(file).size, 255)
        ImageDraw.Draw(mask).rectangle((0, 0, 10, 100), fill=0)
        mask.save(made / f"{file.stem}-masklabel.png")


def _tables(folder: Path) -> None:
    """A folder that is a table and an MDS data set, whose columns and splits come twice with other values."""
    made = folder / "columns"
    rows = [row for file in sorted((folder / "shards").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    for row in rows:
        with Image.open(io.BytesIO(row["image"]["bytes"])) as image, io.BytesIO() as mirrored:
            ImageOps.mirror(image).save(mirrored, "png")
            other = {"bytes": mirrored.getvalue(), "path": row["image"]["path"]}
        row |= {"other_image": other, "other_text": f"another {row['text']}"}
    for row in rows:
        row |= {"other_width": row["height"] * 2, "other_height": row["width"] * 2}
    stream_data.write_parquet(made, rows, shards=2, group=2)
    for file in sorted(made.glob("*.parquet"))[1:]:
        file.rename(made / file.name.replace("train", "test"))
    stream_data.write_parquet(made, rows, shards=1, group=3)
    mds = stream_data.write_mds(folder / "mds", [(row["image"]["bytes"], "from MDS") for row in rows], 3)
    for file in mds.iterdir():
        file.rename(made / file.name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(json.dumps(sorted(entry.name for entry in Path(sys.argv[1]).iterdir())))
