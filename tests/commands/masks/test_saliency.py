"""Masks by a saliency model: what is written, what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_saliency import write_saliency

from simpletune.apps.cli.main import main
from simpletune.commands.masks import saliency
from simpletune.data.sources.folder import Folder
from simpletune.system.options import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A picture that is turned and bright in its upper third, one of a single colour, and one that has a mask."""
    place = tmp_path / "pictures"
    (place / "sub").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn: what is left becomes the top
    image = Image.new("RGB", (90, 60), (30, 30, 30))
    image.paste("white", (0, 0, 30, 60))
    image.save(place / "a.png", exif=exif)
    Image.new("RGB", (64, 64), "grey").save(place / "sub" / "b.png")
    Image.effect_noise((64, 64), 50).convert("RGB").save(place / "c.jpg")
    Image.new("L", (64, 64), "white").save(place / "c-masklabel.jpg")
    return place


def test_masks_of_what_stands_out_are_those_that_training_reads(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (folder / "c-masklabel.jpg").read_bytes()
    model = write_saliency(tmp_path / "model.onnx")
    assert main(["data", str(folder), "--masks-from", str(model)]) == 0
    said = capsys.readouterr().out
    assert "model.onnx names none: check that you may use it" in said and "1 written; 1 picture had one" in said
    assert "sub/b.png has nothing that stands out" in said and "data.mask=files" in said
    mask = Image.open(folder / "a-masklabel.png")
    pixels = np.asarray(mask, np.float32)  # [90, 60]
    assert mask.mode == "L" and mask.size == (60, 90)
    assert pixels[:28].min() > 240 and pixels[32:].max() < 40
    assert (folder / "c-masklabel.jpg").read_bytes() == kept and not (folder / "c-masklabel.png").exists()
    scan = Folder(path=str(folder), mask="files").scan(folder)
    assert [each.name for each in scan.images] == ["a.png", "c.jpg"]
    assert main(["data", str(folder), "--masks-from", str(model)]) == 0
    assert "0 written; 2 pictures had one" in capsys.readouterr().out


def test_a_configuration_says_where_masks_lie_and_the_model_its_licence(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "masks").mkdir()
    data = {"path": str(folder), "prompt": "x", "mask": "files", "mask_path": str(tmp_path / "masks")}
    (tmp_path / "config.json").write_text(json.dumps({"name": "x", "data": data}))
    model = write_saliency(tmp_path / "model.onnx", license="Apache-2.0", side="side")
    assert main(["data", str(tmp_path / "config.json"), "--masks-from", str(model)]) == 0
    said = capsys.readouterr().out
    assert "license  Apache-2.0 (by its file)" in said and "data.mask=files" not in said
    assert sorted(each.name for each in (tmp_path / "masks").iterdir()) == ["a.png", "c.png"]
    (tmp_path / "config.json").write_text(json.dumps({"name": "x", "data": {"path": str(folder), "mask": "alpha"}}))
    assert main(["data", str(tmp_path / "config.json"), "--masks-from", str(model)]) == 2
    assert "has no mask files, but opacity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, "cannot be read"),
        ({}, "cannot be loaded"),
        ({"channels": 4}, r"the inputs \[\[1, 4, 320, 320\]\], not one of \[1, 3, 320, 320\]"),
        ({"inputs": 2}, r"the inputs \[\[1, 3, 320, 320\], \[1, 3, 320, 320\]\], not one"),
        ({"side": 40_000}, r"is 40000 x 40000 px; sides are from 1 to 4096"),
        ({"side": 0}, r"is 0 x 0 px; sides are from 1 to 4096"),
        ({"kept": 0}, r"is \[320\], not one value for each pixel"),
    ],
)
def test_what_is_no_saliency_model_is_refused(
    tmp_path: Path, folder: Path, options: dict[str, int] | None, message: str
) -> None:
    model = tmp_path / "model.onnx"
    if options is not None:
        write_saliency(model, **options) if options else model.write_bytes(b"no model")
    with pytest.raises(UserError, match=message):
        saliency.write_masks([Folder(path=str(folder))], model)
    assert not (folder / "a-masklabel.png").exists()


def test_a_missing_onnxruntime_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpletune.system.extras.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"optional extra 'masks'.*pip install"):
        saliency.SaliencyModel(tmp_path / "model.onnx")
