"""The verbs that Windows is to have, with a Python and files like there (``like_windows``), leave what Linux leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from like_windows import run_like_windows
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

from simpletune.apps.cli.main import main

PROGRAM = """
from simpletune.apps.cli.main import main
for verb in {}:
    assert main(verb) == 0, verb
"""
DRAW = ["generate", "--device", "cpu", "--steps", "1", "--size", "64x64", "--prompt", "a café", "--out", "drawn.png"]
BEFORE = [
    ["check", "demo"],
    ["init", "pics", "--yes"],
    ["import", "peer.json", "--out", "imported.json"],
    ["data", "pics.json", "model.pretrained=org/none", "--out", "looked"],  # without tokenizers: transformers takes 1 s
    ["estimate", "demo"],
]
TRAIN = ["train", "demo", "data.path=pics", "train.steps=2", "schedule.warmup_steps=1", "checkpoint.every=1"]
TRAIN += ["checkpoint.keep_last=1", "validation.every=2", "validation.steps=1", "output.cache=cache"]
LOOK = ["data", "demo", "data.path=pics", "--out", "looked"]
RUN = [TRAIN, TRAIN, [*TRAIN, "train.steps=4", "--resume", "latest"], [*DRAW, "--run", "runs/demo"], LOOK]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with four pictures, whose captions have lines as on Windows, and a configuration of kohya's."""
    (tmp_path / "user" / "pics").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "user")
    for number in range(4):
        Image.new("RGB", (64, 64), (number * 37, number * 11, number)).save(f"pics/{number}.png")
        Path(f"pics/{number}.txt").write_bytes(f"a café, № {number}\r\nthe same café\r\n".encode())
    Path("peer.json").write_text('{"network_module": "networks.lora_sd3", "train_data_dir": "pics"}')
    return tmp_path / "user"


def run_as_both(place: Path, verbs: list[list[str]], capsys: pytest.CaptureFixture[str]) -> tuple[Path, str, str]:
    """Run verbs in a folder as on Windows, and in its copy under the same path as here.

    Returns:
        The folder of the first ones, and what both printed.
    """
    there = place.with_name("windows")
    shutil.copytree(place, place.with_name("copy"))
    printed = run_like_windows(PROGRAM.format(verbs), place)
    place.rename(there)
    place.with_name("copy").rename(place)
    os.chdir(place)
    capsys.readouterr()
    for verb in verbs:
        assert main(verb) == 0
    return there, printed.replace("\r\n", "\n"), capsys.readouterr().out


def test_before_a_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, printed, here = run_as_both(place, BEFORE, capsys)
    assert re.sub("look: .*", "", printed) == re.sub("look: .*", "", here)
    for name in ("pics.json", "imported.json", "looked/data.json"):
        assert (there / name).read_text(encoding="utf-8") == (place / name).read_text(encoding="utf-8"), name


@pytest.mark.slow
def test_a_run_and_a_picture(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, _, _ = run_as_both(place, RUN, capsys)
    assert (there / "drawn.png").read_bytes() == (place / "drawn.png").read_bytes()
    looked = [(folder / "looked/data.json").read_text(encoding="utf-8") for folder in (there, place)]
    assert looked[0] == looked[1]
    assert listed(there / "runs") == listed(place / "runs")
    runs = [folder / "runs" / "demo" for folder in (there, place)]
    for name in ("pytorch_lora_weights.safetensors", "checkpoints/step-000004/trainable.safetensors"):
        assert_close(*(load_file(run / name) for run in runs), rtol=0, atol=0)
    losses = [[row.get("loss") for row in map(json.loads, open(run / "metrics.jsonl", "rb"))] for run in runs]
    assert losses[0] == losses[1] and losses[0]


def listed(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*")}
