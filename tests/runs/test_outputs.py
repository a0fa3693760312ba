"""What a run exports, in diffusers' own hands; and pictures against diffusers' own pipeline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from blocks import predict_velocity
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_runs import merged, run_with

from simpletune.adapters.files.attach import load_loras
from simpletune.apps.cli.generate import compare_arguments, generate_arguments
from simpletune.commands.generate.compare import compare
from simpletune.commands.generate.generate import generate
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.engine.quant.precision import FP32
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs import checkpoint
from simpletune.stages.sample import ImageRequest, Sampler
from simpletune.stages.step.train_step import attach
from simpletune.stages.text_cache import TextCache
from simpletune.system.options import UserError


def trained_model(run: Path) -> torch.nn.Module:
    """The run's model as it stood at its last checkpoint."""
    saved = checkpoint.find_checkpoint("latest", run)
    config = resolve_folders(validate(saved.config, "saved"))
    model = config.model.load_denoiser(config.precision, torch.device("cpu"))
    checkpoint.restore(saved, model, attach(config, model), config.optimizer)
    return model.eval()


def plain_denoiser(pipeline: Path) -> torch.nn.Module:
    model = SD3().model_copy(update={"pretrained": str(pipeline)})
    return model.load_denoiser(FP32(), torch.device("cpu"))


@pytest.fixture
def inputs(tiny_pipeline: Path) -> dict[str, torch.Tensor]:
    config = SD3Transformer2DModel.load_config(tiny_pipeline / "transformer")
    generator = torch.Generator().manual_seed(0)
    return {
        "z_t": torch.randn(2, 16, 4, 4, generator=generator),
        "sigma": torch.tensor([0.3, 0.8]),
        "prompt_embeds": torch.randn(2, 85, config["joint_attention_dim"], generator=generator),
        "pooled": torch.randn(2, config["pooled_projection_dim"], generator=generator),
    }


@torch.no_grad()
def velocity(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return predict_velocity(model, **inputs, dtype=torch.float32)


@pytest.mark.parametrize("adapter", [{"rank": 2}, {"rank": 4, "alpha": 3.0, "targets": "all_linear"}], ids=str)
def test_the_lora_file_does_in_diffusers_what_it_did_here(adapter, tiny_config, tiny_pipeline, inputs) -> None:
    run = run_with(tiny_config, adapter=adapter, train={"steps": 6})
    ours = velocity(trained_model(run), inputs)
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_pipeline, dtype=torch.float32)
    base = velocity(pipeline.transformer, inputs)
    pipeline.load_lora_weights(run, weight_name="pytorch_lora_weights.safetensors")
    theirs = velocity(pipeline.transformer, inputs)
    effect = (ours - base).abs().max()
    assert effect > 1e-3
    assert (theirs - ours).abs().max() < 1e-4 * effect

    model = plain_denoiser(tiny_pipeline)
    load_loras(model, [(run / "pytorch_lora_weights.safetensors", 1.0)])
    assert (velocity(model, inputs) - ours).abs().max() < 1e-4 * effect


def test_without_strength_or_with_the_adapter_off_the_model_is_the_base(tiny_config, tiny_pipeline, inputs) -> None:
    run = run_with(tiny_config, adapter={"targets": "all_linear"}, train={"steps": 4})
    base = velocity(plain_denoiser(tiny_pipeline), inputs)
    results = []
    for scale in (0.0, 1.0):
        model = plain_denoiser(tiny_pipeline)
        load_loras(model, [(run / "pytorch_lora_weights.safetensors", scale)])
        results.append(velocity(model, inputs))
    model = trained_model(run)
    with validate(tiny_config, "x").adapter.disabled(model):
        results.append(velocity(model, inputs))
    results.append(velocity(model, inputs))
    assert [torch.equal(found, base) for found in results] == [True, False, True, False]


def test_the_full_model_loads_in_diffusers_and_is_drawn_by_default(tiny_config, inputs, tmp_path: Path) -> None:
    tiny_config["adapter"] = {"method": "full"}
    run = run_with(tiny_config, train={"steps": 5}, validation={"prompts": ["a red disc"], "steps": 3})
    theirs = SD3Transformer2DModel.from_pretrained(run / "transformer", dtype=torch.float32)
    assert torch.equal(velocity(theirs, inputs), velocity(trained_model(run), inputs))
    drawn = generate(arguments("--runs", str(tmp_path / "runs")))
    expected = Image.open(run / "samples" / "step-000005" / "prompt-00.png")
    assert drawn.name == "0001-full-seed0.png" and list(Image.open(drawn).getdata()) == list(expected.getdata())


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("size", [(32, 32), (64, 32)])
def test_latents_equal_those_of_diffusers(guidance: float, size: tuple[int, int], tiny_pipeline, shared_cache) -> None:
    model = SD3(t5_length=8).model_copy(update={"pretrained": str(tiny_pipeline)})
    text = TextCache(model, torch.float32, shared_cache)
    request = ImageRequest("a red disc", 7, "blurry", *size, steps=6, guidance=guidance)
    text.fill([request.prompt, request.negative_prompt], torch.device("cpu"))
    transformer = model.load_denoiser(FP32(), torch.device("cpu"))
    sampler = Sampler(transformer, model, FP32(), objective=Flow())
    ours = sampler.denoise([request], [text.load(request.prompt)], [text.load("blurry")])
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_pipeline, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt=request.prompt, negative_prompt="blurry", width=size[0], height=size[1], num_inference_steps=6,
        guidance_scale=guidance, generator=torch.Generator("cpu").manual_seed(7), output_type="latent",
        max_sequence_length=8,
    ).images  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate_arguments(parser)
    return parser.parse_args(words)


GENERATED = {"train": {"steps": 15}, "validation": {"prompts": ["a red disc"], "steps": 3}}


def test_generate_repeats_the_runs_validation_pictures(tiny_config, copy_run, tmp_path: Path, capsys) -> None:
    run = copy_run(merged(tiny_config, **GENERATED))
    base = generate(arguments("--runs", str(tmp_path / "runs"), "--base"))
    tuned = generate(arguments("--runs", str(tmp_path / "runs")))
    folder = run / "inference"
    assert base == folder / "0001-base-seed0.png" and tuned == folder / "0002-lora-seed0.png"
    for ours, validation in ((base, "base"), (tuned, "step-000015")):
        expected = Image.open(run / "samples" / validation / "prompt-00.png")
        assert list(Image.open(ours).getdata()) == list(expected.getdata())
    assert list(Image.open(base).getdata()) != list(Image.open(tuned).getdata())
    assert "s per picture, peak memory" in capsys.readouterr().out
    full = Image.open(generate(arguments("--runs", str(tmp_path / "runs"), "--full")))
    pairs = zip(full.tobytes(), Image.open(tuned).tobytes(), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1 and "merged" in full.text["weights"]
    other = generate(
        arguments("--run", str(run), "--base", "--seed", "3", "--size", "48x32", "--output", str(tmp_path / "o.png"))
    )
    assert Image.open(other).size == (48, 32) and Image.open(other).text["seed"] == "3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("lora_", "other_"),
            "is an unknown kind; resembles most Stable Diffusion 3, with 10 of 13 words of its names",
        ),
        (("transformer.", "lora_unet_transformer."), "is a LoRA for an unknown model"),
        (("transformer_blocks", "single_blocks"), "is a LoRA for Flux"),
        (("blocks.0", "blocks.7"), "7 of 7 layers are not in this model: transformer_blocks.7"),
        (("to_out.0", "to_out.1"), "keys match no layer of Stable Diffusion 3: .*to_out.1"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(
    change, message: str, tiny_config, train_once, tiny_pipeline, tmp_path
) -> None:
    state = load_file(train_once(tiny_config) / "pytorch_lora_weights.safetensors")
    save_file({name.replace(*change): tensor for name, tensor in state.items()}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=message):
        load_loras(plain_denoiser(tiny_pipeline), [(tmp_path / "other.safetensors", 1.0)])


def test_a_truncated_lora_is_refused(tiny_config, train_once, tmp_path: Path) -> None:
    data = (train_once(tiny_config) / "pytorch_lora_weights.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-100])
    with pytest.raises(UserError, match="cut.safetensors is truncated: .* Download it again"):
        load_loras(torch.nn.Module(), [(tmp_path / "cut.safetensors", 1.0)])


def test_compare_draws_base_and_strengths_from_the_same_noise(tiny_config, copy_run, tmp_path: Path) -> None:
    run = copy_run(merged(tiny_config, **GENERATED))
    parser = argparse.ArgumentParser()
    compare_arguments(parser)
    words = ["--runs", str(tmp_path / "runs"), "--seeds", "2", "--scale", "0", "--scale", "1"]
    sheet = compare(parser.parse_args(words))
    assert sheet == run / "compare" / "0001" / "grid.png"
    figures = json.loads(sheet.with_name("compare.json").read_text())["models"]
    assert [len(model["difference_from_base"]) for model in figures] == [2, 2, 2]
    assert figures[0]["difference_from_base"] == figures[1]["difference_from_base"] == [0, 0]
    assert min(figures[2]["difference_from_base"]) > 0
    base = Image.open(sheet.parent / "base" / "000.png")
    assert list(base.getdata()) == list(Image.open(run / "samples" / "base" / "prompt-00.png").getdata())


def test_generate_with_a_model_alone_needs_no_run(tiny_pipeline, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no finished run. Train one first: ./train.sh"):
        generate(arguments("--runs", str(tmp_path)))
    words = ["--model", str(tiny_pipeline), "--base", "--device", "cpu", "--size", "32x32", "--steps", "2"]
    drawn = generate(arguments(*words, "--prompt", "a red disc"))
    assert drawn == Path("inference-out/0001-base-seed0.png") and Image.open(drawn).size == (32, 32)
    with pytest.raises(UserError, match="--prompt is missing"):
        generate(arguments(*words))
