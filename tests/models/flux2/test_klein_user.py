"""FLUX.2 klein as a user meets it: messages, pictures, comparison, server, report, model card, LoRA files of each
method."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import SMALL, pixels_of
from PIL import Image
from safetensors.torch import load_file, save_file
from serving import running
from tiny_runs import TrainOnce, run_with

from simpletune.adapters.files.describe import describe
from simpletune.apps.cli.main import main, parse
from simpletune.apps.serve import server
from simpletune.config.load import validate
from simpletune.engine.tensors import swap_halves
from simpletune.models.families import family_by_name, family_of, public_base
from simpletune.models.flux2.flux2_files import KLEIN, origins
from simpletune.models.flux2.flux2_option import Klein
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs.model_card import example_of, licence, snippet
from simpletune.runs.weights_names import run_config
from simpletune.system.options import ConfigError

PROMPT = "a picture of a large blue heart"


@pytest.fixture
def run(klein_config: dict[str, Any], train_once: TrainOnce) -> Path:
    """A LoRA of one step, with a validation picture before and after."""
    validation = {"prompts": [PROMPT], "steps": 2, "loss_samples": 0}
    more = {"name": "klein", "validation": validation, "train": {"steps": 1}, "optimizer": {"lr": 0.2}}
    return train_once(klein_config | more)


def test_a_base_tells_its_family_and_a_wrong_one_is_corrected(klein: Path, tiny_pipeline: Path) -> None:
    assert isinstance(family_of(str(klein)), Klein) and isinstance(family_of(str(tiny_pipeline)), SD3)
    for name in ("someone/FLUX.2-klein-4B-style", "flux2-klein-base-4b.safetensors", "klein_4b_v2"):
        assert isinstance(family_by_name(name), Klein), name
    for name in ("someone/flux.1-dev", "flux1-dev", "kleinbottle", "sd3_medium"):
        assert not isinstance(family_by_name(name), Klein), name
    for wrong, base, right in (("sd3", klein, "klein"), ("klein", tiny_pipeline, "sd3")):
        with pytest.raises(ConfigError, match=f"Set model.family to {right}"):
            validate({"name": "x", "model": {"family": wrong, "pretrained": str(base)}, "data": {"path": "x"}}, "x")


def test_the_public_model_is_open_and_its_cards_say_its_licence() -> None:
    base = public_base(KLEIN)
    assert base is not None and (base.gated, base.licence, base.commercial) == (False, "Apache-2.0", "yes")
    config = validate({"name": "x", "model": {"family": "klein"}, "data": {"path": "demo:pictures"}}, "x")
    assert (config.data.resolution, config.validation.guidance) == (1024, 4.0)
    assert licence(config) == {"license": "apache-2.0"}


def test_comparison_report_and_server(run: Path, tmp_path: Path) -> None:
    assert main(["compare", str(run), "--prompt", PROMPT, "--out", str(tmp_path / "c"), *SMALL]) == 0
    figures = json.loads((tmp_path / "c" / "compare.json").read_text())
    distances = [each["latent_distance_from_base"][0] for each in figures["models"]]
    assert distances[0] == 0 < distances[1] and "guidance 4" in (tmp_path / "c" / "compare.html").read_text()
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "FLUX.2 klein" in (tmp_path / "report.html").read_text()
    service = server.build(parse(["serve", "--run", str(run), "--port", "0", "--device", "cpu", "--max-side", "128"]))
    with running(service) as it:
        it.wait_ready()
        answer = it.predict(PROMPT, lora="klein", width=80, height=64, num_inference_steps=2)
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
    run: Path, klein: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(run, "")
    code = snippet(config, example_of(config, ""))
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/pipeline", str(klein)).replace('RESULT = "."', f"RESULT = {str(run)!r}"), {})
    ours, theirs = (np.asarray(Image.open(file).convert("RGB"), float) for file in
                    (run / "samples" / "step-000001" / "prompt-00.png", tmp_path / "picture.png"))  # fmt: skip
    assert abs(ours - theirs).max() <= 2
    assert "- flux2-klein\n" in (run / "README.md").read_text()


@pytest.mark.parametrize(
    ("method", "reads"),
    [("lora", {"diffusers": "yes", "ComfyUI": "yes"}), ("dora", {"diffusers": "yes", "ComfyUI": "yes"}),
     ("lokr", {"diffusers": "yes", "ComfyUI": "yes"}), ("oft", {"diffusers": "silently nothing", "ComfyUI": "yes"})],
)  # fmt: skip
def test_what_a_run_of_each_method_writes(method: str, reads: dict[str, str], klein_config: dict[str, Any]) -> None:
    train = {"train": {"steps": 1}, "checkpoint": {"every": None}}
    run = run_with(klein_config | {"adapter": {"method": method}} | train)
    (file,) = run.glob("*.safetensors")
    about = describe(file)
    assert reads.items() <= {each["tool"]: each["loads"] for each in about["tools"]}.items(), about["tools"]
    assert about["family"].startswith("FLUX.2")


def test_a_single_file_trains_with_the_rest_of_a_pipeline(
    klein: Path, klein_config: dict[str, Any], tmp_path: Path, train_once: TrainOnce
) -> None:
    """The same losses as from the folder."""
    folder = klein / "transformer"
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    found: dict[str, Any] = {}
    for name, origin in origins(json.loads((folder / "config.json").read_bytes())).items():
        found.setdefault(origin.name, []).append((origin, tensors[name]))
    whole = {}
    for name, parts in found.items():
        rows = torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0].rows or ())])
        whole[name] = swap_halves(rows) if parts[0][0].swapped else rows
    file = tmp_path / "klein.safetensors"
    save_file(whole, file)
    losses = []
    for model in ({"pretrained": str(klein)}, {"pretrained": str(file), "text_encoders": str(klein)}):
        run = run_with(klein_config | {"model": klein_config["model"] | model, "train": {"steps": 2}})
        losses.append(json.loads((run / "summary.json").read_text())["final_loss"])
    assert losses[0] == losses[1]
