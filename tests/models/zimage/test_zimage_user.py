"""Z-Image as a user meets it: messages, pictures, comparison, server, report, model card, LoRA files of each method,
and the assistant of its Turbo."""

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
from simpletune.apps.web.form.presets import preset
from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import suggest
from simpletune.config.load import validate
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.families import family_by_name, family_of, public_base
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.zimage.zimage_files import BASE, TURBO, origins
from simpletune.models.zimage.zimage_option import ASSISTANT, ZImage
from simpletune.runs.model_card import example_of, licence, snippet
from simpletune.runs.weights_names import run_config
from simpletune.system.gpus import find_card
from simpletune.system.options import ConfigError

PROMPT = "a picture of a large blue heart"


@pytest.fixture
def run(zimage_config: dict[str, Any], train_once: TrainOnce) -> Path:
    """A LoRA of one step, with a validation picture before and after."""
    validation = {"prompts": [PROMPT], "steps": 2, "loss_samples": 0}
    more = {"name": "zimage", "validation": validation, "train": {"steps": 1}, "optimizer": {"lr": 0.2}}
    return train_once(zimage_config | more)


def test_a_base_tells_its_family_and_a_wrong_one_is_corrected(zimage: Path, tiny_pipeline: Path) -> None:
    assert isinstance(family_of(str(zimage)), ZImage) and isinstance(family_of(str(tiny_pipeline)), SD3)
    for name in ("someone/Z-Image-style", "z_image_turbo_bf16.safetensors", "zimage-de-turbo"):
        assert isinstance(family_by_name(name), ZImage), name
    for name in ("someone/flux.1-dev", "lumina-image-2.0", "sd3_medium"):
        assert not isinstance(family_by_name(name), ZImage), name
    for wrong, base, right in (("sd3", zimage, "zimage"), ("zimage", tiny_pipeline, "sd3")):
        with pytest.raises(ConfigError, match=f"Set model.family to {right}"):
            validate({"name": "x", "model": {"family": wrong, "pretrained": str(base)}, "data": {"path": "x"}}, "x")


@pytest.mark.parametrize(("name", "guidance"), [(BASE, 5.0), (TURBO, 1.0)])
def test_the_public_models_are_open_and_their_cards_say_their_licence(name: str, guidance: float) -> None:
    base = public_base(name)
    assert base is not None and (base.gated, base.licence, base.commercial) == (False, "Apache-2.0", "yes")
    data = {"name": "x", "model": {"family": "zimage", "pretrained": name}, "data": {"path": "demo:pictures"}}
    config = validate(data, "x")
    assert (config.data.resolution, config.validation.guidance) == (1024, guidance)
    assert licence(config) == {"license": "apache-2.0"}


@pytest.mark.parametrize(("name", "loras"), [(BASE, None), (TURBO, [f"training:{ASSISTANT}"])])
def test_init_and_new_run_train_turbo_under_its_assistant(
    name: str, loras: list[str] | None, tiny_images: Path
) -> None:
    """As init writes it, and New run offers it."""
    card = find_card("8GiB")
    found = suggest(tiny_images, Answers("style", model=name), card)
    assert found.config["model"].get("loras") == loras and "zimage_lora_8gb" in str(found.reasons)
    assert any(each.path == "model.loras" for each in found.reasons) is bool(loras)
    start = preset(card, None, None, "", model=name)
    assert start.data["model"].get("loras") == loras
    assert ("model.loras" in start.reasons) is bool(loras)


def test_an_assistant_changes_nothing_of_what_is_predicted(zimage_config: dict[str, Any]) -> None:
    """It is merged before the base is quantised; nothing of it is downloaded."""
    model = zimage_config["model"] | {"loras": [f"training:{ASSISTANT}"]}
    plain, under = (
        simulate(validate(zimage_config | {"model": each, "precision": {"weights": "int8"}}, "x"), (64, 64))
        for each in (zimage_config["model"], model)
    )
    assert plain.peak.by_kind == under.peak.by_kind


def test_comparison_report_and_server(run: Path, tmp_path: Path) -> None:
    assert main(["compare", str(run), "--prompt", PROMPT, "--out", str(tmp_path / "c"), *SMALL]) == 0
    figures = json.loads((tmp_path / "c" / "compare.json").read_text())
    distances = [each["latent_distance_from_base"][0] for each in figures["models"]]
    assert distances[0] == 0 < distances[1] and "guidance 5" in (tmp_path / "c" / "compare.html").read_text()
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "Z-Image" in (tmp_path / "report.html").read_text()
    service = server.build(parse(["serve", "--run", str(run), "--port", "0", "--device", "cpu", "--max-side", "128"]))
    with running(service) as it:
        it.wait_ready()
        answer = it.predict(PROMPT, lora="zimage", width=80, height=64, num_inference_steps=2)
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
    run: Path, zimage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the pipeline's guidance, which is one less."""
    config = run_config(run, "")
    code = snippet(config, example_of(config, ""))
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/pipeline", str(zimage)).replace('RESULT = "."', f"RESULT = {str(run)!r}"), {})
    ours, theirs = (np.asarray(Image.open(file).convert("RGB"), float) for file in
                    (run / "samples" / "step-000001" / "prompt-00.png", tmp_path / "picture.png"))  # fmt: skip
    assert abs(ours - theirs).max() <= 2
    assert "- z-image\n" in (run / "README.md").read_text()


@pytest.mark.parametrize(
    ("method", "reads"),
    [("lora", {"diffusers": "yes", "ComfyUI": "yes"}), ("dora", {"diffusers": "yes", "ComfyUI": "yes"}),
     ("lokr", {"ComfyUI": "yes"}), ("oft", {"diffusers": "refuses", "ComfyUI": "yes"})],
)  # fmt: skip
def test_what_a_run_of_each_method_writes(method: str, reads: dict[str, str], zimage_config: dict[str, Any]) -> None:
    train = {"train": {"steps": 1}, "checkpoint": {"every": None}}
    run = run_with(zimage_config | {"adapter": {"method": method}} | train)
    (file,) = run.glob("*.safetensors")
    about = describe(file)
    assert reads.items() <= {each["tool"]: each["loads"] for each in about["tools"]}.items(), about["tools"]
    assert about["family"].startswith("Z-Image")


def test_a_single_file_trains_with_the_rest_of_a_pipeline(
    zimage: Path, zimage_config: dict[str, Any], tmp_path: Path
) -> None:
    """The same losses as from the folder."""
    folder = zimage / "transformer"
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    parts: dict[str, Any] = {}
    for name, origin in origins(json.loads((folder / "config.json").read_bytes())).items():
        parts.setdefault(origin.name, []).append((origin.rows or (), tensors[name]))
    whole = {
        name: torch.cat([tensor for _, tensor in sorted(each, key=lambda part: part[0])])
        for name, each in parts.items()
    }
    file = tmp_path / "z_image.safetensors"
    save_file(whole, file)
    losses = []
    for model in ({"pretrained": str(zimage)}, {"pretrained": str(file), "text_encoders": str(zimage)}):
        run = run_with(zimage_config | {"model": zimage_config["model"] | model, "train": {"steps": 2}})
        losses.append(json.loads((run / "summary.json").read_text())["final_loss"])
    assert losses[0] == losses[1]
