"""Qwen-Image as a user meets it: pictures, comparison, server, report, model card, LoRA files of each method."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import SMALL, pixels_of
from PIL import Image
from safetensors.torch import load_file, save_file
from serving import running
from tiny_runs import TrainOnce, run_with

from simpletune.adapters.files.describe import describe
from simpletune.apps.cli.main import main, parse
from simpletune.apps.serve import server
from simpletune.runs.folder import read_metrics
from simpletune.runs.model_card import example_of, snippet
from simpletune.runs.weights_names import run_config

PROMPT = "a picture of a large blue heart"


@pytest.fixture
def run(qwen_config: dict[str, Any], train_once: TrainOnce) -> Path:
    """A LoRA of one step, with a validation picture before and after."""
    validation = {"prompts": [PROMPT], "steps": 2, "loss_samples": 0}
    more = {"name": "qwen", "validation": validation, "train": {"steps": 1}, "optimizer": {"lr": 0.2}}
    return train_once(qwen_config | more)


def test_comparison_report_and_server(run: Path, tmp_path: Path) -> None:
    assert main(["compare", str(run), "--prompt", PROMPT, "--out", str(tmp_path / "c"), *SMALL]) == 0
    figures = json.loads((tmp_path / "c" / "compare.json").read_text())
    distances = [each["latent_distance_from_base"][0] for each in figures["models"]]
    assert distances[0] == 0 < distances[1] and "guidance 4" in (tmp_path / "c" / "compare.html").read_text()
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "Qwen-Image" in (tmp_path / "report.html").read_text()
    service = server.build(parse(["serve", "--run", str(run), "--port", "0", "--device", "cpu", "--max-side", "128"]))
    with running(service) as it:
        it.wait_ready()
        answer = it.predict(PROMPT, lora="qwen", width=80, height=64, num_inference_steps=2)
        assert answer.status_code == 200, answer.text
        served = pixels_of(io.BytesIO(base64.b64decode(answer.json()["predictions"][0])))
    words = ["--run", str(run), "--prompt", PROMPT, "--size", "80x64", *SMALL]
    assert main(["generate", *words, "--out", str(tmp_path / "g.png")]) == 0
    assert pixels_of(tmp_path / "g.png") == served


@pytest.mark.slow
def test_a_run_is_evaluated(run: Path) -> None:
    words = ["--encoders", "demo:tiny-dino", "demo:tiny-clip", "--steps", "2", "--seeds", "1", "--device", "cpu"]
    assert main(["evaluate", str(run), *words]) == 0
    assert json.loads((run / "evaluation.json").read_text())


def test_the_model_card_s_code_draws_as_we_do(
    run: Path, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(run, "")
    code = snippet(config, example_of(config, ""))
    assert "true_cfg_scale=4.0" in code and "negative_prompt=' '" in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/pipeline", str(qwen)).replace('RESULT = "."', f"RESULT = {str(run)!r}"), {})
    ours, theirs = (np.asarray(Image.open(file).convert("RGB"), float) for file in
                    (run / "samples" / "step-000001" / "prompt-00.png", tmp_path / "picture.png"))  # fmt: skip
    assert abs(ours - theirs).max() <= 2
    assert "- qwen-image\n" in (run / "README.md").read_text()


@pytest.mark.parametrize(
    ("method", "reads"),
    [("lora", {"diffusers": "yes", "ComfyUI": "yes"}), ("dora", {"diffusers": "yes", "ComfyUI": "yes"}),
     ("lokr", {"diffusers": "refuses", "ComfyUI": "yes"})],
)  # fmt: skip
def test_what_a_run_of_each_method_writes(method: str, reads: dict[str, str], qwen_config: dict[str, Any]) -> None:
    train = {"train": {"steps": 1}, "checkpoint": {"every": None}}
    run = run_with(qwen_config | {"adapter": {"method": method}} | train)
    (file,) = run.glob("*.safetensors")
    about = describe(file)
    assert reads.items() <= {each["tool"]: each["loads"] for each in about["tools"]}.items(), about["tools"]
    assert about["family"].startswith("Qwen-Image")


def test_a_single_file_trains_with_the_rest_of_a_pipeline(
    qwen: Path, qwen_config: dict[str, Any], tmp_path: Path
) -> None:
    """The same losses as from the folder."""
    (source,) = (qwen / "transformer").glob("*.safetensors")
    file = tmp_path / "qwen.safetensors"
    save_file({f"model.diffusion_model.{name}": each for name, each in load_file(source).items()}, file)
    losses = []
    for model in ({"pretrained": str(qwen)}, {"pretrained": str(file), "text_encoders": str(qwen)}):
        run = run_with(qwen_config | {"model": qwen_config["model"] | model, "train": {"steps": 2}})
        losses.append([row["loss"] for row in read_metrics(run)])
    assert losses[0] == losses[1]
