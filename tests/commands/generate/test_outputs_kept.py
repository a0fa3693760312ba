"""What a user has made stays: pictures get the next number, a name that is taken is refused; PNGs say how they came."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from simpletune.runs.outputs import numbered_folder, require_new, write_numbered
from simpletune.stages.png import generation_parameters, save_png
from simpletune.stages.sample import ImageRequest
from simpletune.system.options import UserError

IMAGE = Image.new("RGB", (16, 16), "red")
A1111 = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')  # how the web UI reads the last line


def test_the_next_number_is_taken_and_nothing_is_replaced(tmp_path: Path) -> None:
    def fails(file: Path) -> None:
        file.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_numbered(tmp_path, "x.txt", fails)
    assert list(tmp_path.iterdir()) == [], "a failure leaves nothing and frees the number"
    for text in "ab":
        write_numbered(tmp_path, "lora.txt", lambda file, text=text: file.write_text(text))
    (tmp_path / "0007-mine.txt").touch()
    (tmp_path / "2024 holiday.txt").touch()
    last = write_numbered(tmp_path, "base.txt", lambda file: file.write_text("c"))
    assert (tmp_path / "0001-lora.txt").read_text() + (tmp_path / "0002-lora.txt").read_text() == "ab"
    assert last == tmp_path / "0008-base.txt"
    assert last.stat().st_mode == (tmp_path / "0007-mine.txt").stat().st_mode


def test_several_at_once_get_different_numbers(tmp_path: Path) -> None:
    def write(number: int) -> Path:
        return write_numbered(tmp_path, f"{number}.txt", lambda file: file.write_text(str(number)))

    with ThreadPoolExecutor(16) as pool:
        files = list(pool.map(write, range(64)))
        folders = list(pool.map(lambda _: numbered_folder(tmp_path / "sub"), range(16)))
    assert sorted(file.name[:4] for file in files) == [f"{n:04d}" for n in range(1, 65)]
    assert sorted(folder.name for folder in folders) == [f"{n:04d}" for n in range(1, 17)]


def test_a_name_that_is_taken_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.png", tmp_path / "b"
    file.touch()
    folder.mkdir()
    require_new(tmp_path / "new.png", False)
    require_new(file, True)
    with pytest.raises(UserError, match=r"--out: .*a.png exists. .* another name, or add --overwrite"):
        require_new(file, False)
    with pytest.raises(UserError, match="--out: .*b is a folder"):
        require_new(folder, True)
    require_new(folder, False, folder=True)
    (folder / "x").touch()
    with pytest.raises(UserError, match="--out: .*b is not empty. .* another name, or remove it"):
        require_new(folder, True, folder=True)


def test_other_tools_read_how_a_picture_was_made(tmp_path: Path) -> None:
    request = ImageRequest('a "dog", blue\nNegative prompt: x', 7, "blurry, é", 64, 32, 12, 3.5)
    more = {"model": "a/b, c: d", "loras": [("my, lora: 2", 0.7)], "weights": "LoRA x", "sampler": "Euler"}
    save_png(IMAGE, tmp_path / "x.png", request, **more)
    text = Image.open(tmp_path / "x.png").text  # type: ignore[attr-defined]
    *lines, last = text["parameters"].split("\n")
    assert lines == ['a "dog", blue Negative prompt: x <lora:my_ lora_ 2:0.7>', "Negative prompt: blurry, é"]
    read = dict(A1111.findall(last))
    assert read.pop("Version").startswith("simpletune ")
    assert read == {
        "Steps": "12", "Sampler": "Euler", "CFG scale": "3.5", "Seed": "7", "Size": "64x32", "Model": "b_ c_ d",
    }  # fmt: skip
    assert all(":" in part for part in last.split(",")), "ComfyUI's reader splits at every comma, then at the colon"
    assert "prompt" not in text, "ComfyUI takes a chunk of this name for a graph in JSON"
    own = json.loads(text["simpletune"])
    assert own["prompt"] == request.prompt and own["negative_prompt"] == "blurry, é" and own["seed"] == 7
    assert own["loras"] == [["my, lora: 2", 0.7]] and own["model"] == "a/b, c: d" and own["weights"] == "LoRA x"
    assert generation_parameters(tmp_path / "x.png") == own
    save_png(IMAGE, tmp_path / "plain.png", ImageRequest("a dog", 1))  # in a chunk that every reader knows
    assert b"tEXtparameters\0a dog\nNegative prompt: \nSteps: 28, " in (tmp_path / "plain.png").read_bytes()


def test_pictures_of_earlier_versions_are_read_too(tmp_path: Path) -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt("prompt", "a cat")
    info.add_text("seed", "3")
    IMAGE.save(tmp_path / "old.png", pnginfo=info)
    IMAGE.save(tmp_path / "none.png")
    old = generation_parameters(tmp_path / "old.png")
    assert (old["prompt"], old["seed"]) == ("a cat", 3) and generation_parameters(tmp_path / "none.png") == {}
