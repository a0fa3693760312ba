"""Validation pictures that paint into pictures: which, where they are shown, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from tiny_runs import merged

from simpletune.apps.web.run.matrix import matrix_of
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.runs.model_card import shareable, snippet
from simpletune.runs.push import files_of
from simpletune.runs.weights_names import CheckpointRef
from simpletune.stages.plan_data import plan_data
from simpletune.stages.prepared import require_inputs, validation_requests, with_inputs
from simpletune.stages.sample import ImageRequest, shown_inputs
from simpletune.system.options import ConfigError, UserError
from simpletune.training import train as verb


@pytest.fixture
def painted(tiny_config: dict, tmp_path: Path) -> dict[str, Any]:
    """A configuration whose validation paints the right half of a red picture."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    mask = Image.new("L", (64, 64))
    mask.paste(255, (32, 0, 64, 64))
    mask.save(tmp_path / "right.png")
    option = {"prompts": ["a blue star"], "images": [str(tmp_path / "red.png")], "steps": 2, "loss_samples": 0}
    option["masks"] = [str(tmp_path / "right.png")]
    return merged(tiny_config, validation=option, train={"steps": 1}, output={"report": True})


def test_sheet_report_and_page_show_picture_mask_and_result(
    painted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = validate(painted, "x")
    verb.train(config)
    run = Path(config.output.runs) / "tiny"
    assert sorted(file.name for file in (run / "samples/input").iterdir()) == ["mask-00.png", "picture-00.png"]
    drawn = Image.open(run / "samples/base/prompt-00.png")
    assert drawn.info["simpletune"].count("right.png") == 1
    sheet = np.asarray(Image.open(run / "samples/grid.png"))
    assert sheet.shape[1] == 8 + 4 * 168, "picture, mask, base and step 1"
    assert tuple(sheet[100, 20]) == (255, 0, 0) and tuple(sheet[100, 320]) == (255, 255, 255)
    report = (run / "report.html").read_text()
    assert 'alt="Picture: a blue star"' in report and 'alt="Mask: a blue star"' in report
    assert "samples/grid.png" in files_of(CheckpointRef(run), "me/stars")
    assert "grid.png shows the pictures that validation painted into: your own" in capsys.readouterr().out
    (row,) = matrix_of(run).rows
    assert [each["file"] for each in row["inputs"]] == ["samples/input/picture-00.png", "samples/input/mask-00.png"]
    Image.open(config.validation.masks[0]).rotate(180).save(config.validation.masks[0])
    verb.train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})}), resume="latest")
    mask = np.asarray(Image.open(run / "samples/input/mask-00.png"))
    assert mask[:, :16].all() and not mask[:, 16:].any(), "of the pictures drawn last"
    shared = shareable(config).validation
    assert shared.images == ["red.png"] and shared.masks == ["right.png"]


def test_what_does_not_fit_is_refused(painted: dict[str, Any], tmp_path: Path) -> None:
    for changes, message in {
        ("images",): "validation.masks: needs validation.images, one for each of them. Add images",
        ("masks",): "validation.images: needs validation.masks, one for each of them. Add masks",
        ("prompts",): "validation.images: 1 of them for 2 in validation.prompts. Give one for each prompt, in order",
    }.items():
        (name,) = changes
        option = {**painted["validation"], name: ["a", "b"] if name == "prompts" else None}
        with pytest.raises(ConfigError, match=message):
            validate({**painted, "validation": option}, "x")
    with pytest.raises(ConfigError, match="validation.images: is empty. Leave it out"):
        validate({**painted, "validation": {**painted["validation"], "prompts": None, "images": [], "masks": []}}, "x")
    config = validate(painted, "x")
    requests = validation_requests(config, plan_data(resolve_folders(config)).plan)
    Image.new("L", (64, 64)).save(tmp_path / "right.png")
    with pytest.raises(UserError, match="^validation.masks.0: it is black in the 32x32 that are drawn"):
        require_inputs(requests, 8)
    (tmp_path / "red.png").unlink()
    with pytest.raises(UserError, match="^validation.images.0: .*red.png cannot be read"):
        require_inputs(requests, 8)


@pytest.mark.parametrize("own", [None, "left", "top"], ids=["random", "own", "own, outside of what is drawn"])
def test_an_inpainting_model_paints_into_the_pictures_of_the_validation_loss(
    own: str | None, tiny_config: dict, unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    folder = unet_pipeline("inpainting-sd15")
    images = shutil.copytree(tiny_config["data"]["path"], tmp_path / "pictures")
    for file in [*images.glob("*.png")] if own else []:
        image = Image.open(file)
        if own == "top":  # a third of a tall picture, of which the middle is drawn
            image = image.resize((64, 192))
            image.save(file)
        mask = Image.new("L", image.size)
        mask.paste(255, (0, 0, mask.width // 2, mask.height) if own == "left" else (0, 0, 64, 40))
        mask.save(file.with_name(f"{file.stem}-masklabel.png"))
    holes = {"mask": "files", "inpainting_mask": "own"} if own else {}
    data = merged(
        tiny_config, data={"resolution": 64, "path": str(images), **holes},
        model={"family": "sd15", "pretrained": str(folder)},
        validation={"prompts": None, "split": 1, "loss_samples": 1},
    )  # fmt: skip
    del data["model"]["t5_length"]
    config = resolve_folders(validate(data, "x"))
    plan = plan_data(config).plan
    (request,) = with_inputs(config, plan, validation_requests(config, plan))
    (held_out,) = plan.held_out
    found = shown_inputs(request)
    assert request.prompt == plan.prompt(held_out, 0) and request.strength == 1
    expected = ImageOps.fit(Image.open(Path(config.data.path) / held_out.image.name).convert("RGB"), (64, 64))
    assert np.abs(np.asarray(found["picture"], float) - np.asarray(expected, float)).mean() < 12
    inside = np.asarray(found["mask"]) > 0
    box = inside[:, :32] if own == "left" else inside[16:48, 16:48]
    assert box.all() and inside.sum() == box.size
    code = snippet(config, ImageRequest("a red disc", 3))
    compile(code, "snippet", "exec")
    assert 'image=load_image("input.png")' in code and 'mask_image=load_image("mask.png")' in code
