"""Stable Diffusion XL as a user meets it: defaults, messages, pictures, comparison, server, model card, photos."""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import original_sdxl
import pytest
from command_line import SMALL, pixels_of
from PIL import Image
from serving import running
from tiny_runs import TrainOnce

from simpletune.apps.cli.main import main, parse
from simpletune.apps.serve import server
from simpletune.commands.generate.generate import image_size
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.models.families import family_by_name, family_of
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_config import SDXL_NAME
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.runs.model_card import example_of, snippet
from simpletune.runs.weights_names import run_config
from simpletune.system.options import ConfigError, UserError

PROMPT = "a glim picture of a large blue heart"


@pytest.fixture(scope="module")
def base(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sdxl")


@pytest.fixture(scope="module")
def older(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sd15")


@pytest.fixture
def run(base: Path, tiny_config: dict, train_once: TrainOnce) -> Path:
    """A LoRA of one step, with a validation picture before and after; it sets no value that the family decides."""
    data = {"path": tiny_config["data"]["path"], "resolution": 64}
    validation = {"prompts": [PROMPT], "steps": 2, "loss_samples": 0}
    more = {"name": "xl", "model": {"family": "sdxl", "pretrained": str(base)}, "data": data, "validation": validation}
    return train_once(tiny_config | more | {"train": {"steps": 1}, "optimizer": {"lr": 0.2}})


def simple(**sections: object) -> dict:
    """A configuration of the family, with sections added."""
    return {"name": "x", "model": {"family": "sdxl"}, "data": {"path": "demo:pictures"}, **sections}


def test_the_family_decides_guidance_resolution_and_objective() -> None:
    config = validate(simple(), "x")
    assert (config.data.resolution, config.validation.guidance, config.objective.name) == (1024, 5.0, "ddpm")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"family": "xl"}}, r'model.family: unknown value "xl". Did you mean sdxl\?'),
        ({"model": {"family": "pony"}}, r'model.family: unknown value "pony". Did you mean sdxl\?'),
        ({"model": {"family": "sdxl", "pretrained": "stable-diffusion-v1-5/stable-diffusion-v1-5"}},
         r"model.pretrained: .* is a model of SD 1.5/2. Set model.family to sd15, or name an SDXL model"),
        ({"model": {"pretrained": "stabilityai/stable-diffusion-xl-base-1.0"}},
         r"model.pretrained: .* is a model of SDXL. Set model.family to sdxl, or name an SD3 model"),
        ({"objective": {"name": "flow", "min_snr_gamma": 5}}, r"min_snr_gamma: .* Only objective.name ddpm has it$"),
        ({"data": {"path": "demo:pictures", "resolution": 1008}}, r"data.resolution: 1008 is not a multiple of 64, "
         r"which SDXL needs. Use 960 or 1024"),
        ({"data": {"path": "demo:pictures", "resolution": 1000}}, r"data.resolution: 1000 is not a multiple of 64, "
         r"which SDXL needs. Use 960 or 1024"),
        ({"validation": {"width": 72}}, r"validation.width: 72 is not a multiple of 64, which SDXL needs. Use 64 or"),
        ({"model": {"family": "xl"}, "objective": {"name": "ddpm"}, "adapter": {"method": "hypernetwork"}},
         r'model.family: unknown value "xl". Did you mean sdxl\?'),
        ({"model": {"pretrained": "someone/Juggernaut-XL-v9"}, "objective": {"name": "ddpm"}},
         r"model.family: it is not stated, and the name of someone/Juggernaut-XL-v9 suggests SDXL. Set it to sdxl, or "
         r"to sd3 if it is an SD3 model"),
    ],
)  # fmt: skip
def test_messages_name_the_family(sections: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(simple(**sections), "x")
    assert len(caught.value.problems) == 1
    assert caught.match(message)


def test_check_says_what_the_unet_predicts_and_by_what(base: Path, tmp_path: Path) -> None:
    unmarked = original_sdxl.write(base, tmp_path / "plain.safetensors")
    marked = original_sdxl.write(base, tmp_path / "marked.safetensors", marks=["v_pred", "ztsnr"])
    stated = {"prediction": "v", "zero_terminal_snr": True}
    for pretrained, objective, said in (
        (SDXL_NAME, {}, "epsilon (the model's scheduler config)"),
        (str(base), {}, "epsilon (the model's scheduler config)"),
        (str(base), {"prediction": "v"}, "v (objective.prediction)"),
        (str(unmarked), {}, "epsilon (the scheduler config in model.text_encoders)"),
        (str(marked), {}, "v, terminal SNR 0 (the file's marks)"),
        (str(marked), {"prediction": "v"}, "v (objective.prediction), terminal SNR 0 (the file's marks)"),
        ("someone/on-the-hub-xl", {}, None),
        ("someone/on-the-hub-xl", stated, "v (objective.prediction), terminal SNR 0 (objective.zero_terminal_snr)"),
    ):
        model = {"family": "sdxl", "pretrained": pretrained}
        model |= {"text_encoders": str(base)} if pretrained.endswith(".safetensors") else {}
        rows = explain(validate(simple(model=model, objective=objective), "x")).splitlines()
        found = [row.removeprefix("  predicts   ") for row in rows if row.startswith("  predicts")]
        assert found == ([said] if said else []), (pretrained, objective)
    assert SDXL(pretrained=str(base), unet=str(marked)).files.schedule_source() == "the file's marks"
    alone = SDXL(pretrained=str(unmarked))
    assert alone.files.schedule_source() == "assumed, since the file does not tell"
    flow = validate({"name": "x", "data": {"path": "demo:pictures"}}, "x")
    assert "predicts" not in explain(flow)


def test_a_stated_family_is_taken_even_if_the_name_suggests_another() -> None:
    name = "someone/Juggernaut-XL-v9"
    for family, noted in (("sdxl", False), ("sd15", True), ("sd3", True)):
        config = validate(simple(model={"pretrained": name, "family": family}), "x")
        assert (f"the name of {name} suggests SDXL, and model.family is {family}" in explain(config)) == noted
    assert validate(simple(model={"pretrained": "someone/sd3_medium-fine"}), "x").model.family == "sd3"


def test_a_base_tells_its_family_by_its_files_or_else_by_its_name(
    base: Path, older: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    for wrong, family, right in (("sd15", base, "sdxl"), ("sdxl", older, "sd15"), ("sd3", base, "sdxl")):
        with pytest.raises(ConfigError) as caught:
            validate(simple(model={"family": wrong, "pretrained": str(family)}), "x")
        assert caught.match(f"Set model.family to {right}"), (wrong, right)
    kinds = {base: SDXL, older: SD15, tiny_pipeline: SD3}
    assert {type(family_of(str(folder))) for folder in kinds} == {SDXL, SD15, SD3}
    assert all(isinstance(family_of(str(folder)), kind) for folder, kind in kinds.items())
    assert family_of("someone/fine-tune-xl") is None, "its files are not here"
    for name in ("someone/Juggernaut-XL-v9", "ponyDiffusionV6XL.safetensors", r"D:\models\noobaiXL_vPred10.safetensors",
                 "OnomaAIResearch/Illustrious-xl-early-release-v0", "models/sd_xl_base_1.0.safetensors",
                 "animagineXLV31_v31", "zavychromaxl_v80", "protovisionXLHighFidelity3D", "dreamshaperXL10_alpha2",
                 "RealVisXL_V5.0", "animaPencilXL_v500"):  # fmt: skip
        assert isinstance(family_by_name(name), SDXL), name
    for name in ("someone/sd3_medium", "stabilityai/stable-diffusion-3.5-large"):
        assert isinstance(family_by_name(name), SD3), name
    for name in ("sdxl/dreamer_v8.safetensors", "someone/axle", "pixels/xlarge", "", "pixlr_v2", "PIXLR", "excel",
                 "sd15_xlora", "sd15_XLora", "t5xxl_fp16", "T5XXL", "fluxlora", "FLUXLora"):  # fmt: skip
        assert family_by_name(name) is None, name


def test_pictures_and_comparison_of_a_run(run: Path, tmp_path: Path) -> None:
    drawn = [Image.open(file).text["parameters"] for file in run.glob("samples/*/prompt-00.png")]  # type: ignore[attr-defined]
    assert len(drawn) == 2 and all("CFG scale: 5" in text for text in drawn)
    main(["compare", str(run), "--prompt", PROMPT, "--out", str(tmp_path / "c"), *SMALL])
    figures = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [each["title"] for each in figures["models"]] == ["base", "LoRA xl x 1"]
    distances = [each["latent_distance_from_base"][0] for each in figures["models"]]
    assert distances[0] == 0 < distances[1]
    assert "guidance 5" in (tmp_path / "c" / "compare.html").read_text()


def test_the_server_draws_what_generate_draws(run: Path, tmp_path: Path) -> None:
    service = server.build(parse(["serve", "--run", str(run), "--port", "0", "--device", "cpu", "--max-side", "128"]))
    with running(service) as it:
        it.wait_ready()
        answer = it.predict(PROMPT, lora="xl", width=72, height=64, num_inference_steps=2)
        assert answer.status_code == 200, answer.text
        served = pixels_of(io.BytesIO(base64.b64decode(answer.json()["predictions"][0])))
        refused = it.predict(PROMPT, width=90, height=64)
        assert refused.status_code == 422
        assert "width: 90 does not fit. It must be a multiple of 8. Use 88 or 96" in refused.text
        assert it.client.get("/info").json()["limits"]["multiple"] == 8  # the page's step
        assert "Did you mean parameters.num_inference_steps" in it.predict(PROMPT, steps=2).text
    words = ["--run", str(run), "--prompt", PROMPT, "--size", "72x64", *SMALL]
    main(["generate", *words, "--out", str(tmp_path / "g.png")])
    assert pixels_of(tmp_path / "g.png") == served
    told = "--size: 90x64, but SDXL needs sides that are multiples of 8. Use 88x64"
    with pytest.raises(UserError, match=told):
        image_size(run_config(run), argparse.Namespace(size=(90, 64)))
    for side in ("92", "4"):
        with pytest.raises(UserError, match=f"--max-side: {side} is not allowed. Use a multiple of 8 from 8 to 4096"):
            server.build(parse(["serve", "--run", str(run), "--port", "0", "--max-side", side]), {})


def test_the_model_card_s_code_draws_as_we_do(
    run: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(run, "")
    code = snippet(config, example_of(config, ""))
    assert "StableDiffusionXLPipeline" in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/sdxl", str(base)).replace('RESULT = "."', f"RESULT = {str(run)!r}"), {})
    ours, theirs = (np.asarray(Image.open(file).convert("RGB"), float) for file in
                    (run / "samples" / "step-000001" / "prompt-00.png", tmp_path / "picture.png"))  # fmt: skip
    assert abs(ours - theirs).max() <= 2
    card = (run / "README.md").read_text()
    assert "- stable-diffusion-xl\n" in card and "StableDiffusionXLPipeline" in card
    assert "license: openrail++" not in card, "a local copy's licence is unknown"


def test_a_base_that_draws_in_few_steps_begins_at_the_last_timestep(base: Path, tmp_path: Path) -> None:
    """Whose folder's scheduler begins earlier; its name tells it, and the model card's code says so."""
    named = tmp_path / "tiny_lightning_4step"
    named.symlink_to(base, target_is_directory=True)
    for folder, times in ((named, [999, 749, 499, 249]), (base, [801, 601, 401, 201])):
        data = {"name": "x", "model": {"family": "sdxl", "pretrained": str(folder)}, "data": {"path": "demo:pictures"}}
        config = validate(data, "x")
        assert config.model.solver(config.objective, (64, 64), 4, 0).times.tolist() == times
        code = snippet(config, example_of(config, ""))
        assert ("timestep_spacing='trailing'" in code) is (folder == named)


@pytest.mark.slow
def test_photos_are_examined_checked_and_trained_in_buckets(real_data: Path, base: Path, tmp_path: Path) -> None:
    photos = next(folder for folder in sorted((real_data / "dreambooth").iterdir()) if any(folder.glob("*.jpg")))
    out = tmp_path / "mine.json"
    words = ["--model", str(base), "--device", "cpu", "--yes", "--out", str(out), "--trigger", "sks backpack"]
    assert main(["init", str(photos), *words]) == 0
    config = json.loads(out.read_text())
    assert config["model"] == {"family": "sdxl", "pretrained": str(base)} and config["data"]["resolution"] == 1024
    small = ["data.resolution=192", "train.steps=2", "validation.every=null", "validation.loss_samples=0",
             f"output.runs={tmp_path}", f"output.cache={tmp_path / 'cache'}", "precision.weights=bf16", "device=cpu",
             "optimizer.name=adamw", "schedule.warmup_steps=0", "name=photos"]  # fmt: skip
    assert main(["check", str(out), *small]) == 0
    assert main(["train", str(out), *small]) == 0
    assert json.loads((tmp_path / "photos" / "summary.json").read_text())["steps"] == 2
