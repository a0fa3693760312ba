"""--image, --mask and --paste of generate and compare, and compare's page with what was painted into."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from simpletune.apps.cli.main import parse
from simpletune.commands.generate.compare_page import write_page
from simpletune.commands.generate.generate import build_requests
from simpletune.commands.generate.session import GeneratedImages
from simpletune.config.schema import TrainConfig
from simpletune.runs.weights import BASE
from simpletune.stages.png import save_png
from simpletune.stages.sample import ImageRequest
from simpletune.system.options import UserError


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    Image.new("L", (64, 64), 255).save(tmp_path / "mask.png")
    return ["--image", str(tmp_path / "red.png"), "--mask", str(tmp_path / "mask.png")]


def requests_of(*words: str) -> list[ImageRequest]:
    data = {"name": "x", "model": {"family": "sd15"}, "data": {"source": "folder", "path": "x", "resolution": 64}}
    session: Any = SimpleNamespace(config=TrainConfig.model_validate(data), run=None)
    return build_requests(session, parse(["generate", "--prompt", "a", *words]))


def test_a_mask_paints_all_steps_unless_a_strength_is_given(files: list[str]) -> None:
    (whole,), (some,) = requests_of(*files), requests_of(*files, "--strength", "0.5", "--paste")
    assert (whole.strength, whole.paste, whole.mask) == (1.0, False, Path(files[3]))
    assert (some.strength, some.paste) == (0.5, True)
    assert requests_of(*files[:2])[0].strength == 0.6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (slice(2, 4), "--mask: there is no picture to paint into"),
        (slice(0, 2), "--paste: without a mask there is nothing outside it. Give one: --mask FILE"),
    ],
)
def test_what_is_missing_is_asked_for(words: slice, message: str, files: list[str]) -> None:
    with pytest.raises(UserError, match=message):
        requests_of(*files[words], "--paste")


def test_page_and_metadata_show_what_was_painted_into(files: list[str], tmp_path: Path) -> None:
    (request,) = requests_of(*files)
    drawn = GeneratedImages(BASE, [Image.new("RGB", (64, 64))], [torch.zeros(1, 4, 8, 8)], 1.0, 1.0)
    figures: Any = {
        "weights": "base", "title": "base", "precision": "fp32", "seconds_per_picture": 2.0,
        "seconds": {"denoise": 1.0, "decode": 1.0}, "difference_from_base": [0.0], "latent_distance_from_base": [0.0],
    }  # fmt: skip
    about = {"device": "cpu", "precision": "fp32", "peak_memory": "1 GiB"}
    write_page(tmp_path / "page.html", [drawn], [request], [figures], about)
    text = (tmp_path / "page.html").read_text()
    assert text.count("<figure>") == 2 and 'alt="mask"' in text
    save_png(drawn.images[0], tmp_path / "a.png", request)
    made = json.loads(Image.open(tmp_path / "a.png").info["simpletune"])
    assert (made["mask"], made["strength"], made["paste"]) == (files[3], 1.0, False)
    save_png(drawn.images[0], tmp_path / "b.png", ImageRequest("a", 0))
    plain = json.loads(Image.open(tmp_path / "b.png").info["simpletune"])
    assert not {"image", "mask", "paste", "strength"} & set(plain)
