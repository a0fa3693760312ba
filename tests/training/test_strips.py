"""A slider's validation draws a strip over strengths, which the report shows with a slider."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_runs import TrainOnce

from simpletune.runs.report import report_at_end
from simpletune.stages.png import generation_parameters

CONCEPT = {
    "directions": [{"target": "a circle", "positive": "a large circle", "negative": "a small circle"}],
    "resolutions": [32],
    "drawing_steps": 3,
}


@pytest.fixture
def slider(tiny_config: dict, copy_run: TrainOnce) -> Path:
    del tiny_config["data"]
    validation = {"prompts": ["a circle", "a heart"], "every": 2, "steps": 2, "loss_samples": 0}
    return copy_run(tiny_config | {"name": "slider", "concept": CONCEPT, "validation": validation})


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB")).astype(int)


def test_every_strength_is_drawn_from_the_same_noise(slider: Path) -> None:
    samples = slider / "samples"
    for step in (2, 4):
        state = samples / f"step-{step:06d}"
        names = sorted(file.relative_to(state).as_posix() for file in state.rglob("*.png"))
        folders = ["", "strength+2/", "strength-1/", "strength-2/"]
        assert names == sorted(f"{folder}prompt-{number:02d}.png" for folder in folders for number in (0, 1))
    how = generation_parameters(state / "strength-2" / "prompt-01.png")
    assert (how["prompt"], how["seed"], how["weights"]) == ("a heart", 1, "step 4, strength -2")
    base = pixels(samples / "base" / "prompt-00.png")
    away = [np.abs(pixels(state / at / "prompt-00.png") - base).sum() for at in ("", "strength+2", "strength-2")]
    assert 0 < away[0] < away[1] and away[2] > 0
    assert Image.open(samples / "strengths.png").width > 5 * 160


def test_the_report_has_a_slider_over_them(slider: Path) -> None:
    page = report_at_end(slider).read_text()
    assert "drawings per second at this pace" in page and "training pictures per second" not in page
    for strength in (-2, -1, 0, 1, 2):
        assert page.count(f'data-strength="{strength}"') == 2
    assert 'data-strengths="-2,-1,0,1,2"' in page and page.count('" hidden>') >= 8
    assert "samples/strengths.png" in (slider / "report.md").read_text()
    card = (slider / "README.md").read_text()
    assert "trained from prompts alone" in card and "'a circle': strength 1 towards 'a large circle'" in card
    assert json.loads((slider / "summary.json").read_text())["eval_loss_after"] is None


def test_another_run_draws_no_strip(tiny_config: dict, train_once: TrainOnce) -> None:
    tiny_config["validation"] = {"prompts": ["a circle"], "steps": 2, "loss_samples": 0}
    run = train_once(tiny_config)
    assert not list(run.rglob("strength*")) and "data-strength=" not in report_at_end(run).read_text()
