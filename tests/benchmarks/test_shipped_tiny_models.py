"""The shipped tiny models draw what they are asked for, and diffusers draws the same with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    Flux2KleinPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
)
from PIL import Image

from benchmarks.quality import GUIDANCE, STEPS, STYLE, Easel, Prompt, accuracies, prompts_of, unrelated
from benchmarks.tiny_models import checker, train_autoencoder
from simpletune.config.load import read_config, validate
from simpletune.config.resolve import resolve_folders
from simpletune.data import demo
from simpletune.data.demo import demo_scenes
from simpletune.runs.weights import BASE, run_result
from simpletune.training.train import train

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "sd3": {"pretrained": demo.TINY_SD3, "t5_length": 24},
    "sdxl": {"family": "sdxl", "pretrained": demo.TINY_SDXL},
    "klein": {"family": "klein", "pretrained": demo.TINY_KLEIN, "text_length": 32},
}
SIZES = {"sd3": 11e6, "sdxl": 13e6, "klein": 8e6}  # bytes
MADE_BY = {"sd3": "autoencoder_log.jsonl text_log.jsonl transformer_log.jsonl summary.json tiny_sd3_from_scratch.json",
           "sdxl": "unet_log.jsonl summary.json tiny_sdxl_from_scratch.json tiny_sdxl_v.json",
           "klein": "transformer_log.jsonl summary.json tiny_klein_from_scratch.json"}  # fmt: skip
NAMES = {"sd3": "tiny-sd3", "sdxl": "tiny-sdxl-v", "klein": "tiny-klein"}
PIPELINES = {"sd3": StableDiffusion3Pipeline, "sdxl": StableDiffusionXLPipeline, "klein": Flux2KleinPipeline}
LEAST = {
    "sd3": {"colour": 0.85, "background": 0.85, "position": 0.8, "shape": 0.6},
    "sdxl": {"colour": 0.4, "background": 0.25, "position": 0.7, "shape": 0.6},
    "klein": {"colour": 0.8, "background": 0.9, "position": 0.9, "shape": 0.45},
}
"""Of 36 prompts, below the figures of the cards by three standard deviations of so few; chance is a tenth, a ninth, a
fifth and an eighth."""


@pytest.fixture(scope="module", params=list(MODELS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def easel(family: str, tmp_path_factory: pytest.TempPathFactory) -> Easel:
    data = {
        "name": "shipped", "device": "cpu", "precision": {"weights": "fp32"}, "model": MODELS[family],
        "data": {"path": "demo:pictures", "resolution": 64}, "output": {"cache": str(tmp_path_factory.mktemp("cache"))},
    }  # fmt: skip
    return Easel(resolve_folders(validate(data, "shipped")), BASE, torch.device("cpu"))


@pytest.fixture(scope="module")
def drawn(family: str, easel: Easel) -> list[tuple[Prompt, Image.Image]]:
    """A few prompts and their pictures."""
    prompts = prompts_of(3, None, None)[1:]
    return list(zip(prompts, easel.draw(prompts), strict=True))


@pytest.fixture(scope="module")
def pipeline(family: str) -> Any:
    folder = demo.MODELS[MODELS[family]["pretrained"]]
    pipeline = PIPELINES[family].from_pretrained(folder, local_files_only=True)
    if family == "sdxl":
        pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_it_is_small_and_says_how_it_was_made(family: str) -> None:
    folder = demo.MODELS[MODELS[family]["pretrained"]]
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < SIZES[family]
    assert {"README.md", "model_index.json"} <= {file.name for file in folder.iterdir()}
    assert set(MADE_BY[family].split()) <= {file.name for file in (folder / "made_by").iterdir()}
    assert json.loads((folder / "made_by" / "summary.json").read_text())["name"] == NAMES[family]


def test_it_draws_what_it_is_asked_for(drawn: list[tuple[Prompt, Image.Image]]) -> None:
    for prompt, image in drawn:
        read = checker.read_image(image)
        assert {name: getattr(read, name) for name in checker.ATTRIBUTES} == vars(prompt.scene), prompt.text
        assert read.fit > 0.7


@pytest.mark.slow
def test_it_draws_most_of_what_it_is_asked_for(family: str, easel: Easel) -> None:
    prompts = prompts_of(36, None, None)
    scores = accuracies(easel.draw(prompts), prompts)
    assert {name: least for name, least in LEAST[family].items() if scores[name] < least} == {}


def test_diffusers_draws_the_same_picture(family: str, pipeline: Any, drawn: list[tuple[Prompt, Image.Image]]) -> None:
    size, no_words = {"height": 64, "width": 64}, {"negative_prompt": ""}
    own = {
        "sd3": {"max_sequence_length": 24} | no_words,
        "sdxl": size | no_words,
        "klein": size | {"max_sequence_length": 32},  # and no negative prompt
    }[family]
    for prompt, image in drawn[:1]:
        theirs = pipeline(
            prompt=prompt.text, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
            generator=torch.Generator("cpu").manual_seed(prompt.seed), **own,
        ).images[0]  # fmt: skip
        assert np.abs(np.asarray(image, float) - np.asarray(theirs, float)).max() <= 2  # of 255


@pytest.mark.parametrize("family", ["sd3"], indirect=True)
def test_the_autoencoder_gives_pictures_back(family: str, pipeline: Any) -> None:
    for style in demo_scenes.STYLES:
        held_out = train_autoencoder.render(8, seed=77, held_out=True, style=style)
        assert train_autoencoder.psnr(pipeline.vae, held_out) >= 30, style


@pytest.mark.parametrize("family", ["sd3"], indirect=True)
def test_words_without_a_meaning_are_told_apart_and_embeddings_survive_saving(
    family: str, pipeline: Any, tmp_path: Path
) -> None:
    pipeline.save_pretrained(tmp_path)
    again = StableDiffusion3Pipeline.from_pretrained(tmp_path, local_files_only=True)
    texts = [f"a {word} picture of a small red circle on the left, on a mint background"
             for word in ("zorp", "blick", "flat")]  # fmt: skip
    with torch.no_grad():
        before, after = (p.encode_prompt(texts, None, None, max_sequence_length=24) for p in (pipeline, again))
    for at in (0, 2):  # hidden and pooled
        embeds = before[at]
        assert torch.equal(embeds, after[at])
        for a, b in ((0, 1), (0, 2), (1, 2)):
            assert float((embeds[a] - embeds[b]).norm() / embeds[a].norm()) > 0.02


@pytest.mark.slow
def test_the_demo_shows_its_style_with_the_trigger_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    places = [f"output.{name}={tmp_path}/{name}" for name in ("runs", "profiles", "cache")]
    config, _ = read_config(Path("demo_sdxl"), [*places, "device=cpu", "validation.prompts=[]"])
    easel = Easel(resolve_folders(config), run_result(train(config)), torch.device("cpu"))
    shares = [
        np.mean([checker.read_image(image).style == STYLE for image in easel.draw(prompts)])
        for prompts in (prompts_of(24, STYLE, demo_scenes.STYLE_TRIGGER), unrelated(24))
    ]
    assert shares[0] >= 0.5 and shares[1] <= 0.2
