"""What a run exports, in diffusers' own hands; and pictures against diffusers' own pipeline."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import pytest
import torch
from blocks import predict_velocity
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from simpletune.adapters.files.attach import load_loras
from simpletune.apps.cli.generate import compare_arguments, generate_arguments
from simpletune.commands.generate.compare import compare
from simpletune.commands.generate.generate import generate
from simpletune.commands.train.train import train
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.engine.quant.precision import FP32
from simpletune.models.sd3.option import SD3
from simpletune.runs import checkpoint
from simpletune.stages.sample import PictureRequest, Sampler
from simpletune.stages.step.train_step import attach
from simpletune.stages.text_cache import TextCache
from simpletune.system.options import UserError


def run_with(tiny_config: dict, **changes: dict) -> Path:
    data = copy.deepcopy(tiny_config)
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return train(validate(data, "test"))


def trained_model(run: Path, tiny_config: dict, **changes: dict) -> torch.nn.Module:
    """The run's model as it stood at its last checkpoint."""
    saved = checkpoint.find_checkpoint("latest", run)
    config = resolve_folders(validate(saved.config, "saved"))
    model = config.model.load_denoiser(config.precision, torch.device("cpu"))
    checkpoint.restore(saved, model, attach(config, model), config.optimizer)
    return model.eval()


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
    run = run_with(tiny_config, adapter=adapter, train={"steps": 20})
    ours = velocity(trained_model(run, tiny_config), inputs)
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_pipeline, dtype=torch.float32)
    base = velocity(pipeline.transformer, inputs)
    pipeline.load_lora_weights(run, weight_name="pytorch_lora_weights.safetensors")
    theirs = velocity(pipeline.transformer, inputs)
    effect = (ours - base).abs().max()
    assert effect > 1e-3
    assert (theirs - ours).abs().max() < 1e-4 * effect

    model = SD3().model_copy(update={"pretrained": str(tiny_pipeline)}).load_denoiser(FP32(), torch.device("cpu"))
    load_loras(model, [(run / "pytorch_lora_weights.safetensors", 1.0)])
    assert (velocity(model, inputs) - ours).abs().max() < 1e-4 * effect


def test_the_scale_of_a_lora(tiny_config, tiny_pipeline, inputs) -> None:
    run = run_with(tiny_config, adapter={"targets": "all_linear"}, train={"steps": 10})
    loader = SD3().model_copy(update={"pretrained": str(tiny_pipeline)})
    results = []
    for scale in (0.0, 1.0):
        model = loader.load_denoiser(FP32(), torch.device("cpu"))
        load_loras(model, [(run / "pytorch_lora_weights.safetensors", scale)])
        results.append(velocity(model, inputs))
    base = velocity(loader.load_denoiser(FP32(), torch.device("cpu")), inputs)
    torch.testing.assert_close(results[0], base, rtol=0, atol=0)
    assert not torch.equal(results[1], base)


def test_the_full_model_loads_in_diffusers(tiny_config, inputs) -> None:
    run = run_with({**tiny_config, "adapter": {"method": "full"}}, train={"steps": 3})
    theirs = SD3Transformer2DModel.from_pretrained(run / "transformer", dtype=torch.float32)
    torch.testing.assert_close(
        velocity(theirs, inputs), velocity(trained_model(run, tiny_config), inputs), rtol=0, atol=0
    )


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("size", [(32, 32), (64, 32)])
def test_latents_equal_those_of_diffusers(guidance: float, size: tuple[int, int], tiny_pipeline, shared_cache) -> None:
    model = SD3(t5_length=8).model_copy(update={"pretrained": str(tiny_pipeline)})
    text = TextCache(model, torch.float32, shared_cache)
    request = PictureRequest("a red disc", 7, "blurry", *size, steps=6, guidance=guidance)
    text.fill([request.prompt, request.negative_prompt], torch.device("cpu"))
    transformer = model.load_denoiser(FP32(), torch.device("cpu"))
    sampler = Sampler(transformer, model, FP32())
    ours = sampler.denoise([request], [text.load(request.prompt)], [text.load("blurry")])
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_pipeline, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt=request.prompt, negative_prompt="blurry", width=size[0], height=size[1], num_inference_steps=6,
        guidance_scale=guidance, generator=torch.Generator("cpu").manual_seed(7), output_type="latent",
        max_sequence_length=8,
    ).images  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_with_the_adapter_off_the_model_is_the_base(tiny_config, tiny_pipeline, inputs) -> None:
    run = run_with(tiny_config, adapter={"targets": "all_linear"}, train={"steps": 10})
    model = trained_model(run, tiny_config)
    adapter = validate(tiny_config, "x").adapter
    base = SD3().model_copy(update={"pretrained": str(tiny_pipeline)}).load_denoiser(FP32(), torch.device("cpu"))
    with adapter.disabled(model):
        torch.testing.assert_close(velocity(model, inputs), velocity(base, inputs), rtol=0, atol=0)
    assert not torch.equal(velocity(model, inputs), velocity(base, inputs))


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate_arguments(parser)
    return parser.parse_args(words)


def test_generate_repeats_the_runs_validation_pictures(tiny_config, tmp_path: Path, capsys) -> None:
    run = run_with(tiny_config, train={"steps": 15}, validation={"prompts": ["a red disc"], "steps": 3})
    base = generate(arguments("--runs", str(tmp_path / "runs"), "--base"))
    tuned = generate(arguments("--runs", str(tmp_path / "runs")))
    folder = run / "inference"
    assert base == folder / "0001-base-seed0.png" and tuned == folder / "0002-lora-seed0.png"
    for ours, validation in ((base, "base"), (tuned, "step-000015")):
        expected = Image.open(run / "samples" / validation / "prompt-00.png")
        assert list(Image.open(ours).getdata()) == list(expected.getdata())
    assert list(Image.open(base).getdata()) != list(Image.open(tuned).getdata())
    assert "s per picture, peak memory" in capsys.readouterr().out
    other = generate(
        arguments("--run", str(run), "--base", "--seed", "3", "--size", "48x32", "--output", str(tmp_path / "o.png"))
    )
    assert Image.open(other).size == (48, 32) and Image.open(other).text["seed"] == "3"


def test_generate_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run. Train one first: ./train.sh"):
        generate(arguments("--runs", str(tmp_path)))


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: name.replace("lora_A", "first").replace("lora_B", "second"), "is an unknown kind of file"),
        (lambda name: "lora_unet_" + name, "is a LoRA for an unknown model"),
        (lambda name: name.replace("transformer_blocks", "single_blocks"), "is a LoRA for Flux"),
        (
            lambda name: name.replace("blocks.0", "blocks.7"),
            "7 of 7 layers are not in this model: transformer_blocks.7",
        ),
        (lambda name: name.replace("to_out.0", "to_out.1"), "keys match no layer of Stable Diffusion 3: .*to_out.1"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(rename, message: str, tiny_config, tiny_pipeline, tmp_path: Path) -> None:
    run = run_with(tiny_config, train={"steps": 1})
    state = load_file(run / "pytorch_lora_weights.safetensors")
    save_file({rename(name): tensor for name, tensor in state.items()}, tmp_path / "other.safetensors")
    model = SD3().model_copy(update={"pretrained": str(tiny_pipeline)}).load_denoiser(FP32(), torch.device("cpu"))
    with pytest.raises(UserError, match=message):
        load_loras(model, [(tmp_path / "other.safetensors", 1.0)])


def test_a_truncated_lora_is_refused(tiny_config, tiny_pipeline, tmp_path: Path) -> None:
    run = run_with(tiny_config, train={"steps": 1})
    data = (run / "pytorch_lora_weights.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-100])
    with pytest.raises(UserError, match="cut.safetensors is truncated: .* Download it again"):
        load_loras(torch.nn.Module(), [(tmp_path / "cut.safetensors", 1.0)])


def test_the_full_model_of_a_lora_run_draws_what_the_lora_draws(tiny_config, tmp_path: Path) -> None:
    run_with(tiny_config, train={"steps": 15}, validation={"prompts": ["a red disc"], "steps": 3})
    lora, full = (
        generate(arguments("--runs", str(tmp_path / "runs"), *words, "--output", str(tmp_path / f"{len(words)}.png")))
        for words in ([], ["--full"])
    )
    pixels = [list(Image.open(file).getdata()) for file in (lora, full)]
    assert max(abs(a - b) for x, y in zip(*pixels, strict=True) for a, b in zip(x, y, strict=True)) <= 1
    assert "merged" in Image.open(full).text["weights"]


def test_the_full_model_of_a_full_run_is_drawn_by_default(tiny_config, tmp_path: Path) -> None:
    config = {**tiny_config, "adapter": {"method": "full"}}
    run = run_with(config, train={"steps": 5}, validation={"prompts": ["a red disc"], "steps": 3})
    drawn = generate(arguments("--runs", str(tmp_path / "runs")))
    expected = Image.open(run / "samples" / "step-000005" / "prompt-00.png")
    assert drawn.name == "0001-full-seed0.png" and list(Image.open(drawn).getdata()) == list(expected.getdata())


def test_compare_draws_base_and_strengths_from_the_same_noise(tiny_config, tmp_path: Path) -> None:
    run = run_with(tiny_config, train={"steps": 15}, validation={"prompts": ["a red disc"], "steps": 3})
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
    words = ["--model", str(tiny_pipeline), "--base", "--device", "cpu", "--size", "32x32", "--steps", "2"]
    drawn = generate(arguments(*words, "--prompt", "a red disc"))
    assert drawn == Path("inference-out/0001-base-seed0.png") and Image.open(drawn).size == (32, 32)
    with pytest.raises(UserError, match="--prompt is missing"):
        generate(arguments(*words))
