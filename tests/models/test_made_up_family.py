"""A family that the package does not know runs on all of it (``support/made_up.py``)."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from PIL import Image
from safetensors.torch import load_file
from simulated import assert_same_bytes
from tiny_runs import merged, resumed_from, run_with, saved_weights

from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.engine.quant.precision import FP32
from simpletune.estimate.simulate.simulate_stages import encoder_snapshot, simulate_encoding, simulate_parts
from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.models.text.prompts import Prompts
from simpletune.runs.folder import read_metrics
from simpletune.stages.sample import ImageRequest, Sampler, noises
from simpletune.stages.step.attention import attention_calls
from simpletune.stages.step.synthetic import CPU
from simpletune.system.options import ConfigError, UserError

LORA: dict[str, Any] = {"adapter": {"method": "lora", "rank": 2}}
DRAWN: dict[str, Any] = {
    "train": {"batch_size": 3}, "validation": {"prompts": ["a dot"], "every": 4, "steps": 2},
}  # fmt: skip
STREAMED: dict[str, Any] = {
    "adapter": {"method": "lokr"}, "precision": {"weights": "int8"},
    "memory": {"resident_blocks": 1, "checkpointing": "all", "modulation": "plan", "modulation_window": 3},
}  # fmt: skip
"""What klein's tests do not say of it: prompts of their own lengths, with a mask."""


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with made_up.registered():
        yield


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.build(tmp_path_factory.mktemp("made-up") / "pipeline")


@pytest.fixture
def config(tiny_config: dict, pipeline: Path) -> dict[str, Any]:
    return tiny_config | {
        "model": {"family": "made_up", "pretrained": str(pipeline)},
        "data": tiny_config["data"] | {"resolution": 64},
        "checkpoint": {"every": 2},
    }


@pytest.mark.parametrize("case", [LORA | DRAWN, STREAMED], ids=["drawn", "streamed"])
def test_it_trains_and_resumes_to_the_bit(case: dict[str, Any], config: dict[str, Any]) -> None:
    data = merged(config, **case)
    whole = run_with(data)
    assert all(math.isfinite(row["loss"]) for row in read_metrics(whole))
    before, after = saved_weights(whole, 2), saved_weights(whole, 4)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any((before[name] != tensor).any() for name, tensor in after.items())
    torch.testing.assert_close(saved_weights(resumed_from(whole, data, 2), 4), after, rtol=0, atol=0)
    if data["validation"]["prompts"]:
        assert len(list((whole / "samples").rglob("*.png"))) >= 1
        card = (whole / "README.md").read_text()  # whose pipeline takes no negative prompt
        assert "Flux2KleinPipeline" in card and "guidance_scale=4.0" in card and "negative_prompt" not in card


@pytest.mark.parametrize("case", [LORA | {"train": {"batch_size": 2}}, STREAMED], ids=["two", "streamed"])
def test_its_step_takes_the_same_bytes_real_and_fake(case: dict[str, Any], config: dict[str, Any]) -> None:
    assert_same_bytes(validate(merged(config, **case), "bytes"))


def test_its_other_stages_take_the_same_bytes_real_and_fake(config: dict[str, Any]) -> None:
    drawn = {"prompts": ["a dot"], "steps": 4, "width": 96, "height": 64, "loss_samples": 1}
    read = validate(merged(config, validation=drawn), "stages")
    stages, model = simulate_parts(read, (96, 64)).stages, read.model
    assert {name for name, found in stages.items() if found.bytes > 0} == {"text", "latents", "train", "validate"}
    (encoder,), vae = model.text.encoders, model.autoencoder.load(CPU, torch.float32)
    opened = encoder.open(model.files.part("text_encoder"), torch.float32, CPU, None)  # type: ignore[arg-type]
    assert stages["text"].by_kind == encoder_snapshot(opened, model.text.tokens).by_kind
    assert stages["latents"].by_kind == simulate_encoding(model, vae, (96, 64)).by_kind


def test_a_masked_batch_predicts_what_each_sample_does_alone(config: dict[str, Any]) -> None:
    model, draw = validate(config, "masked").model, torch.Generator().manual_seed(1)
    denoiser = model.load_denoiser(FP32(), CPU).eval()
    z, time = torch.randn(3, 128, 4, 4, generator=draw), torch.tensor([0.1, 0.5, 0.9])
    prompts = [Conditioning(torch.randn(length, 64, generator=draw)) for length in (7, 3, 7)]
    with torch.no_grad():
        whole = model.predict(denoiser, z, time, stack(prompts), torch.float32)
        for number, prompt in enumerate(prompts):
            alone = model.predict(denoiser, z[[number]], time[[number]], stack([prompt]), torch.float32)
            torch.testing.assert_close(whole[[number]], alone, rtol=1e-4, atol=1e-5)


def test_the_kernel_of_a_batch_with_a_mask_is_predicted_and_tried(config: dict[str, Any]) -> None:
    """Flash attention takes no mask; a batch of one, whose prompt has no padding, needs none, but drawing one picture
    with guidance has two prompts."""
    bf16 = config | {"precision": {"weights": "bf16"}}
    drawn = {"prompts": ["a dot"], "loss_samples": 1, "width": 64, "height": 64, "steps": 2}
    one = validate(merged(bf16, validation=drawn), "one")
    two = validate(merged(bf16, train={"batch_size": 2}, validation=drawn | {"guidance": 1.0}), "two")
    for read, masks in ((one, [False, False, True]), (two, [True, False, False])):
        job = simulate_parts(read, (64, 64))
        works = [job.train.sections, job.work["evaluate"], job.work["draw"]]
        for sections, masked in zip(works, masks, strict=True):
            kinds = {work.kind.removesuffix("_backward") for each in sections for work in each.work}
            assert ("attention_masked" in kinds) == masked, (read.train.micro_batch, kinds)
    masked = {(call.batch, call.masked) for read in (one, two) for call in attention_calls(read, [(64, 64)])}
    assert masked == {(1, False), (2, True)}  # also of guidance, which has two prompts


def test_a_picture_is_that_of_diffusers_pipeline(config: dict[str, Any], pipeline: Path) -> None:
    """Template, tapped layers, noise levels, statistics of the latents: all but the network's time and sign."""
    read = validate(config, "picture")
    model, prompts, request = read.model, ("a red dot", ""), ImageRequest("", 0, "", 96, 64, 3, 4.0)
    assert isinstance(model, made_up.MadeUp)
    ours = Prompts(model.text, torch.float32)
    (encoder,) = ours.encoders
    positive, negative = (ours.assemble({"qwen3": found}) for found in ours.encode(encoder, prompts, CPU))
    sampler = Sampler(model.load_denoiser(FP32(), CPU).eval(), model, FP32(), objective=read.objective)
    with torch.no_grad():
        z = sampler.denoise([request], [positive], [negative])
        found = model.autoencoder.decode(model.autoencoder.load(CPU, torch.float32), z)

    theirs = Flux2KleinPipeline.from_pretrained(pipeline, local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    embeds = [
        theirs._get_qwen3_prompt_embeds(
            theirs.text_encoder, theirs.tokenizer, each, max_sequence_length=96, hidden_states_layers=made_up.TAPS
        )
        for each in prompts
    ]
    for own, other in zip((positive.embeds, negative.embeds), embeds, strict=True):
        torch.testing.assert_close(other[0, : len(own)], own, rtol=1e-4, atol=1e-5)
    network = theirs.transformer.forward
    theirs.transformer.forward = lambda timestep, **named: (-network(timestep=1 - timestep, **named)[0],)
    wanted = theirs(
        prompt_embeds=embeds[0][:, : len(positive.embeds)],
        negative_prompt_embeds=embeds[1][:, : len(negative.embeds)],
        latents=noises(request, model).start,
        height=64, width=96, num_inference_steps=3, guidance_scale=4.0, output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_its_lora_is_written_and_read_in_two_layouts(config: dict[str, Any], tmp_path: Path, pipeline: Path) -> None:
    """Also by diffusers, and by the package's own drawing."""
    run = run_with(config | {"adapter": {"method": "lora", "rank": 2, "targets": "attention_mlp"}})
    (own,) = run.glob("*.safetensors")
    updates, native, back = read_lora(own), tmp_path / "native.safetensors", tmp_path / "back.safetensors"
    assert {layer.split(".")[0] for layer in updates} == set(made_up.BLOCKS)
    assert main(["export", str(own), "--format", "comfy", "--out", str(native)]) == 0
    modules = {key.partition(".lora_")[0].removesuffix(".alpha") for key in load_file(native)}
    assert {
        f"diffusion_model.double_blocks.1.{name}" for name in ("img_attn.qkv", "txt_attn.qkv", "img_mlp.0")
    } < modules
    assert {f"diffusion_model.single_blocks.1.{name}" for name in ("linear1", "linear2")} < modules
    assert main(["export", str(native), "--format", "diffusers", "--out", str(back)]) == 0
    for file in (native, back):
        found = read_lora(file)
        assert found.keys() == updates.keys()
        for layer, update in updates.items():
            torch.testing.assert_close(found[layer].delta(), update.delta(), rtol=1e-4, atol=1e-6)

    theirs = Flux2Transformer2DModel.from_pretrained(pipeline / "transformer", local_files_only=True)
    theirs.load_lora_adapter(load_file(back), prefix="transformer")
    layer = "single_transformer_blocks.1.attn.to_qkv_mlp_proj"
    x, lora = torch.eye(32), theirs.get_submodule(layer)
    torch.testing.assert_close((lora(x) - lora.base_layer(x)).T, updates[layer].delta(), rtol=1e-4, atol=1e-6)
    drawn = []
    for words in ([], ["--lora", str(native)], ["--base"]):
        out = tmp_path / "drawn.png"
        given = ["--model", str(pipeline), "--precision", "fp32"] if "--lora" in words else ["--run", str(run)]
        given += ["--prompt", "a dot", "--seed", "3", "--steps", "2", "--size", "64x64"]
        assert main(["generate", *given, *words, "--device", "cpu", "--out", str(out), "--overwrite"]) == 0
        drawn.append(Image.open(out).tobytes())
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_does_not_fit_together_is_refused(config: dict[str, Any], pipeline: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(pipeline, tmp_path / "copy")
    data = config | {
        "model": config["model"] | {"pretrained": str(copy)},
        "output": config["output"] | {"cache": str(tmp_path)},
    }

    def changed(part: str, **settings: object) -> None:
        file = copy / part / "config.json"
        file.write_text(json.dumps(json.loads((pipeline / part / "config.json").read_bytes()) | settings))

    changed("text_encoder", hidden_size=48)
    with pytest.raises(
        ConfigError, match=r"a text encoder of width 96, and the transformer reads 64\. Use the pipeline"
    ):
        validate(data, "width")
    changed("text_encoder")
    changed("vae", latent_channels=16)
    with pytest.raises(ConfigError, match="makes latents of 64 channels, and the model reads 128. Use the autoencoder"):
        validate(data, "channels")
    changed("vae", block_out_channels=[8, 8, 8])
    with pytest.raises(ConfigError, match="latents of 8 pixels a side for each place, and the model reads 16"):
        validate(data, "downsampling")
    changed("vae")
    (copy / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template .*Qwen3 reads prompts. Download the tokenizer again"):
        run_with(data)


@pytest.mark.parametrize(
    ("part", "field", "widths"),
    [("text_encoder", "hidden_size", r"48 \+ 16 \+ 32"), ("text_encoder_3", "d_model", r"16 \+ 16 \+ 48")],
)
def test_sd3s_encoders_fit_its_transformer_too(
    part: str, field: str, widths: str, tiny_config: dict, tiny_pipeline: Path, tmp_path: Path
) -> None:
    """CLIP's, side by side, may be narrower than T5's."""
    file = shutil.copytree(tiny_pipeline, tmp_path / "copy") / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {field: 48}))
    with pytest.raises(ConfigError, match=f"text encoders of widths {widths}, and the transformer reads 32"):
        validate(merged(tiny_config, model={"pretrained": str(tmp_path / "copy")}), "widths")


def test_of_which_family_a_model_is_and_what_it_lacks_is_said(config: dict[str, Any], tiny_pipeline: Path) -> None:
    with pytest.raises(ConfigError, match="is a model of SD3. Set model.family to sd3"):
        validate(merged(config, model={"pretrained": str(tiny_pipeline)}), "SD3's")
    with pytest.raises(ConfigError, match="is a model of Made-up. Set model.family to made_up"):
        validate(merged(config, model={"family": "sd3"}), "not SD3's")
    mask = torch.ones(3, dtype=torch.bool)
    prompts = [Conditioning(torch.zeros(3, 64), each) for each in (mask, None)]
    with pytest.raises(UserError, match="some prompts of a batch have mask and others do not"):
        stack(prompts)


def test_a_single_file_is_refused_where_it_is_given(
    config: dict[str, Any], pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.safetensors"
    shutil.copy(pipeline / "transformer" / "diffusion_pytorch_model.safetensors", file)
    words = f"{re.escape(str(file))} is a single file, and Made-up models have none. Give a folder in diffusers' layout"
    for field in ("pretrained", "transformer"):
        with pytest.raises(ConfigError, match=f"model.{field}: {words}"):
            validate(merged(config, model={field: str(file)}), "x")
    for part in ("scheduler", "transformer", "tokenizer"):
        with pytest.raises(UserError, match=f"^{words}"):
            made_up.MadeUp(pretrained=str(file)).files.part(part)
    layer = "single_transformer_blocks.0.attn.to_out"
    lora = write_lora({layer: LoraUpdate(torch.ones(2, 128), torch.ones(32, 2), 1.0)}, tmp_path / "a.safetensors")
    out = tmp_path / "merged.safetensors"
    assert main(["merge", str(lora), "--base", str(pipeline), "--out", str(out)]) == 2
    assert f"{out}: Made-up models have no single files. Give --out a folder" in capsys.readouterr().err
    assert main(["merge", str(lora), "--base", str(pipeline), "--out", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "config.json").is_file()


def test_the_commands_know_it(
    config: dict[str, Any], pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, images = tmp_path / "config.json", config["data"]["path"]
    file.write_text(json.dumps(config))
    assert main(["check", str(file)]) == main(["estimate", str(file), "--device", "L4"]) == 0
    said = capsys.readouterr().out
    assert "Qwen3 with at most 96 tokens" in said and "predicted peak memory on the card" in said
    words = ["generate", "--base", "--model", str(pipeline), "--device", "cpu", "--prompt", "a dot", "--no-t5"]
    assert main(words) == 2
    assert "Made-up has no T5 text encoder that it can do without; it reads prompts with Qwen3. Leave --no-t5 out" in (
        capsys.readouterr().err
    )
    layer = "single_transformer_blocks.0.attn.to_out"
    lora = write_lora({layer: LoraUpdate(torch.ones(2, 128), torch.ones(32, 2), 1.0)}, tmp_path / "a.safetensors")
    assert main(["inspect", str(lora)]) == 0
    said = capsys.readouterr().out
    assert "Made-up" in said and "ComfyUI    untested; how it reads LoRAs for Made-up is not known" in said
    assert main(["init", images, "--model", str(pipeline), "--out", str(tmp_path / "init.json"), "--yes"]) == 2
    assert "is a Made-up model, and no configuration for those ships" in capsys.readouterr().err
