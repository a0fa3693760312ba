"""The tiny SDXL that comes with the tool: it draws what it is asked for, diffusers draws the same with it, and its demo
shows the style that it teaches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusionXLPipeline

from benchmarks.quality import GUIDANCE, STEPS, STYLE, Easel, accuracies, prompts_of, unrelated
from benchmarks.tiny_models import checker
from simpletune.commands.train.train import train
from simpletune.config.load import read_config, validate
from simpletune.config.resolve import resolve_folders
from simpletune.data import demo
from simpletune.data.demo import pictures
from simpletune.runs.weights import BASE, run_result

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
FOLDER = demo.MODELS[demo.TINY_SDXL]


@pytest.fixture(scope="module")
def easel(tmp_path_factory: pytest.TempPathFactory) -> Easel:
    data = {
        "name": "shipped", "device": "cpu", "precision": {"weights": "fp32"},
        "model": {"family": "sdxl", "pretrained": demo.TINY_SDXL}, "data": {"path": "demo:pictures", "resolution": 64},
        "output": {"cache": str(tmp_path_factory.mktemp("cache"))},
    }  # fmt: skip
    return Easel(resolve_folders(validate(data, "shipped")), BASE, CPU)


def test_it_is_small_and_says_how_it_was_made() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 13e6
    assert {"README.md", "model_index.json"} <= {file.name for file in files}
    made_by = FOLDER / "made_by"
    assert (made_by / "unet_log.jsonl").exists() and (made_by / "tiny_sdxl_from_scratch.json").exists()
    assert json.loads((made_by / "summary.json").read_text())["name"] == "tiny-sdxl-v"


@pytest.mark.parametrize("count", [12, pytest.param(36, marks=pytest.mark.slow)])
def test_it_draws_what_it_is_asked_for(count: int, easel: Easel) -> None:
    prompts = prompts_of(count, None, None)
    scores = accuracies(easel.draw(prompts), prompts)
    # Its card has more; chance is an eighth, a tenth, a ninth and a fifth.
    assert scores["shape"] >= 0.6 and scores["colour"] >= 0.4
    assert scores["background"] >= 0.25 and scores["position"] >= 0.7


def test_diffusers_draws_the_same_picture(easel: Easel) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(FOLDER, local_files_only=True)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    prompt = prompts_of(1, None, None)[0]
    ours = np.asarray(easel.draw([prompt])[0], float)
    theirs = pipeline(
        prompt.text, negative_prompt="", num_inference_steps=STEPS, guidance_scale=GUIDANCE, height=64, width=64,
        generator=torch.Generator("cpu").manual_seed(prompt.seed),
    ).images[0]  # fmt: skip
    assert np.abs(ours - np.asarray(theirs, float)).max() <= 2  # of 255


@pytest.mark.slow
def test_the_demo_shows_its_style_with_the_trigger_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    places = [f"output.{name}={tmp_path}/{name}" for name in ("runs", "profiles", "cache")]
    config, _ = read_config(Path("demo_sdxl"), [*places, "device=cpu", "validation.prompts=[]"])
    easel = Easel(resolve_folders(config), run_result(train(config)), CPU)
    shares = [
        np.mean([checker.read_picture(image).style == STYLE for image in easel.draw(prompts)])
        for prompts in (prompts_of(24, STYLE, pictures.STYLE_TRIGGER), unrelated(24))
    ]
    assert shares[0] >= 0.5 and shares[1] <= 0.2
