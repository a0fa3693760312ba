"""A tiny klein against diffusers' transformer, pipeline and training script, and its text side against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import taef2
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from PIL import Image

from benchmarks.tiny_models import tiny_klein
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import FP32
from simpletune.estimate.disk_needs import bytes_of_prompt
from simpletune.models.flux2.flux2_option import Klein
from simpletune.models.flux2.flux2_text import KleinText
from simpletune.models.objectives.flow import Flow
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.text.prompts import Prompts
from simpletune.stages.sample import ImageRequest, Sampler, noises
from simpletune.stages.step.synthetic import CPU
from simpletune.stages.text_cache import TextCache

PROMPTS = ("a red dot", "", " Zwei Zeilen\nund ein 🐕 ", "many words " * 60)
"""The last is cut."""


@pytest.fixture
def read(klein_config: dict[str, Any]) -> TrainConfig:
    return validate(klein_config, "klein")


@pytest.fixture(scope="module")
def pipeline(klein: Path) -> Flux2KleinPipeline:
    found = Flux2KleinPipeline.from_pretrained(klein, local_files_only=True)
    found.set_progress_bar_config(disable=True)
    return found


def encoded(model: Klein, prompts: tuple[str, ...] = PROMPTS) -> list[Conditioning]:
    """The states of prompts, as the encoder gives them before they are packed."""
    side = Prompts(model.text, torch.float32)
    (encoder,) = side.encoders
    return [side.assemble({"qwen3": each}) for each in side.encode(replace(encoder, packed=False), prompts, CPU)]


def states(pipeline: Flux2KleinPipeline, prompt: str, length: int = 64) -> torch.Tensor:
    """The states of a prompt by the pipeline's own code, with its own layers."""
    return pipeline.encode_prompt(prompt, max_sequence_length=length)[0][0]


def test_prompts_are_the_pipelines_padding_included(read: TrainConfig, pipeline: Flux2KleinPipeline) -> None:
    """Each alone, whatever else is encoded with it: template, cut, layers 9, 18 and 27, and states of padding."""
    for prompt, own in zip(PROMPTS, encoded(read.model), strict=True):
        assert own.embeds.shape == (64, 96) and own.mask is None
        assert torch.equal(own.embeds, states(pipeline, prompt)), prompt


def test_a_cached_prompt_takes_half_the_bytes_and_its_error_is_that_of_int8(read: TrainConfig, tmp_path: Path) -> None:
    """Of the published model 4.0 MiB instead of 7.5, which a run's need of disk space counts."""
    cache = TextCache(read.model, torch.float32, tmp_path)
    cache.fill(PROMPTS, CPU)
    for prompt, exact in zip(PROMPTS, encoded(read.model), strict=True):
        ours, whole = cache.load(prompt).embeds, exact.embeds
        assert 0 < float((ours - whole).norm() / whole.norm()) < 0.01
    sizes = [file.stat().st_size for file in cache.caches[0].folder.glob("*.safetensors")]
    assert len(sizes) == len(PROMPTS) and max(sizes) < bytes_of_prompt(read) + 1100  # a header and the caption
    published = read.model_copy(update={"model": Klein()})
    assert bytes_of_prompt(published) == 512 * (7680 + 4 * 120)


@pytest.mark.parametrize("size", [(5, 3), (1, 4)], ids=str)
def test_predictions_are_the_transformers(read: TrainConfig, pipeline: Flux2KleinPipeline, size: tuple) -> None:
    """Of a batch, with as many rows and columns as it pleases, packed and placed by the pipeline's own code."""
    draw = torch.Generator().manual_seed(1)
    z, embeds = torch.randn(2, 128, *size, generator=draw), torch.randn(2, 9, 96, generator=draw)
    sigma = torch.tensor([0.7503, 0.1])
    with torch.no_grad():
        model = read.model.load_denoiser(FP32(), CPU).eval()
        ours = read.model.predict(model, z, sigma, Conditioning(embeds), torch.float32)
        ids = pipeline._prepare_latent_ids(z)
        theirs = pipeline.transformer(
            hidden_states=pipeline._pack_latents(z), encoder_hidden_states=embeds, timestep=sigma, img_ids=ids,
            txt_ids=pipeline._prepare_text_ids(embeds), guidance=None, return_dict=False,
        )[0]  # fmt: skip
    assert torch.equal(ours, pipeline._unpack_latents_with_ids(theirs, ids))


def test_a_picture_is_that_of_the_pipeline(read: TrainConfig, pipeline: Flux2KleinPipeline) -> None:
    """Of odd sides: noise levels whose shift depends on tokens and steps, guidance, statistics of latents."""
    model, request = read.model, ImageRequest("", 0, "", 80, 48, 5, 4.0)
    positive, negative = encoded(model, ("a red dot", ""))
    sampler = Sampler(model.load_denoiser(FP32(), CPU).eval(), model, FP32(), objective=read.objective)
    with torch.no_grad():
        z = sampler.denoise([request], [positive], [negative])
        found = model.autoencoder.decode(model.autoencoder.load(CPU, torch.float32), z)
    wanted = pipeline(
        prompt="a red dot", latents=noises(request, model).start, height=48, width=80, num_inference_steps=5,
        guidance_scale=4.0, max_sequence_length=64, output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-6)


def test_loss_and_gradients_are_those_of_diffusers_script(read: TrainConfig, klein: Path) -> None:
    """The arithmetic of train_dreambooth_lora_flux2_klein.py, but for its layers of Qwen3."""
    draw, index = torch.Generator().manual_seed(2), torch.tensor([250, 900])
    pixels, embeds = torch.rand(2, 3, 48, 80, generator=draw) * 2 - 1, torch.randn(2, 9, 96, generator=draw)
    noise = torch.randn(2, 128, 3, 5, generator=draw)

    vae = AutoencoderKLFlux2.from_pretrained(klein / "vae").eval()
    theirs = Flux2Transformer2DModel.from_pretrained(klein / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(klein / "scheduler")
    with torch.no_grad():
        x = Flux2KleinPipeline._patchify_latents(vae.encode(pixels).latent_dist.mode())
    mean, variance = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
    x = (x - mean) / torch.sqrt(variance + vae.config.batch_norm_eps)
    ids, sigmas = Flux2KleinPipeline._prepare_latent_ids(x), scheduler.sigmas[index].view(-1, 1, 1, 1)
    predicted = theirs(
        hidden_states=Flux2KleinPipeline._pack_latents((1.0 - sigmas) * x + sigmas * noise),
        timestep=scheduler.timesteps[index] / 1000, guidance=None, encoder_hidden_states=embeds,
        txt_ids=Flux2KleinPipeline._prepare_text_ids(embeds), img_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    predicted = Flux2KleinPipeline._unpack_latents_with_ids(predicted, ids)
    wanted = ((predicted.float() - (noise - x).float()) ** 2).reshape(2, -1).mean(1).mean()
    wanted.backward()

    model, process = read.model, read.objective.process(read.model.files.scheduler_config, read.model.flow)
    z_0 = model.autoencoder.encode(model.autoencoder.load(CPU, torch.float32), pixels)
    torch.testing.assert_close(z_0, x, rtol=1e-6, atol=1e-6)
    denoiser, level = model.load_denoiser(FP32(), CPU).train().requires_grad_(True), scheduler.sigmas[index]
    z_t = process.noised(z_0, noise, level)
    predicted = model.predict(denoiser, z_t, process.time(level), Conditioning(embeds), torch.float32)
    loss = process.loss(predicted, process.target(z_0, noise, level), level)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    own = dict(denoiser.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-5 * largest)


def test_a_time_in_bf16_is_rounded_as_diffusers_does(read: TrainConfig) -> None:
    """With a modulation plan, too: 8 bits are left of it, once before and once after the product with 1000."""
    modulation = read.model.architecture.modulation
    assert modulation is not None
    (time, _) = modulation.inputs(torch.tensor([0.7503]), None, torch.bfloat16)
    assert time.tolist() == [752.0]  # type: ignore[union-attr]


def test_pictures_are_drawn_in_the_bases_own_steps(read: TrainConfig) -> None:
    assert (read.validation.steps, read.validation.guidance) == (50, 4.0)


def test_the_published_model() -> None:
    """By what ships, without a download."""
    model = Klein()
    network = model.architecture
    assert network.parameter_count() == 3_875_544_576
    assert (network.blocks(), model.text.width, model.text.tokens) == (25, 7680, 512)
    assert model.autoencoder.shape(1024, 768) == (128, 48, 64)
    linear = {name.removesuffix(".weight"): s for name, s in network.known_shapes().items() if len(s) == 2}
    counts = {}
    for name, pattern in model.lora[0].names.targets.items():
        found = [shape for layer, shape in linear.items() if pattern.search(layer)]
        counts[name] = len(found), sum(16 * sum(shape) for shape in found)
    assert counts == {"attention": (80, 18_677_760), "all_linear": (100, 24_084_480)}
    assert not any(name.endswith("bias") for name in network.known_shapes())
    scheduler, tokens = model.files.scheduler_config(), network.image_tokens((1024, 1024))
    levels = Flow().solver(scheduler, 50, 0, model.flow, lambda: tokens).levels
    shift = levels[25] / (1 - levels[25])  # of one half
    assert float(shift) == pytest.approx(7.56, abs=0.01)


@pytest.mark.data
def test_the_real_tokenizer_reads_prompts_as_the_tiny_one(real_data: Path, klein: Path) -> None:
    (encoder,) = KleinText(Klein()).encoders
    folder = real_data / "families" / "flux2_klein_config" / "tokenizer"
    real, tiny = encoder.read_tokenizer(folder), encoder.read_tokenizer(klein / "tokenizer")
    for prompt in PROMPTS[:3]:
        assert encoder.text(real, prompt) == encoder.text(tiny, prompt)
    assert encoder.counts(real, ["a red dot", ""]) == [15, 12]
    for tokenizer, first in ((real, 151643), (tiny, 256)):
        ids, mask, padded = encoder.tokenize(tokenizer, ["a red dot", ""])
        assert ids.shape == (2, 512) and padded and mask is not None
        assert mask.sum(1).tolist() == encoder.counts(tokenizer, ["a red dot", ""])
        special = [int(number) - first for number in ids[0][mask[0]] if number >= first]
        names = ("<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")
        assert special == [tiny_klein.SPECIAL.index(each) for each in names]
        assert set(ids[~mask].tolist()) == {first}


@pytest.mark.data
def test_photographs_come_back_from_their_latents(real_data: Path, read: TrainConfig) -> None:
    """Of a trained autoencoder by the statistics of what it makes of them; the latents are the pipeline's."""
    files = sorted((real_data / "dreambooth" / "dog6").glob("0[0-2].jpg"))
    opened = [Image.open(file).convert("RGB").resize((128, 96)) for file in files]
    pixels = torch.from_numpy(np.stack([np.asarray(each) for each in opened])).permute(0, 3, 1, 2) / 127.5 - 1
    autoencoder = read.model.autoencoder
    vae = autoencoder.load(CPU, torch.float32)
    taef2.put_into(vae, real_data / "families" / "flux2_klein_config" / "taef2")
    raw = Flux2KleinPipeline._patchify_latents(vae.encode(pixels).latent_dist.mode())
    vae.bn.running_var, vae.bn.running_mean = torch.var_mean(raw, dim=(0, 2, 3))
    z = autoencoder.encode(vae, pixels)
    assert z.shape == (len(opened), 128, 6, 8)
    torch.testing.assert_close(z.std((0, 2, 3)), torch.ones(128), rtol=1e-2, atol=0)
    wanted = torch.nn.functional.batch_norm(raw, vae.bn.running_mean, vae.bn.running_var, eps=1e-4)
    torch.testing.assert_close(z, wanted)
    error = (autoencoder.decode(vae, z) - (pixels / 2 + 0.5)).square().mean((1, 2, 3))
    assert (-10 * error.log10()).min() > 27  # dB


def test_each_layer_sees_the_rows_that_are_said_of_it(read: TrainConfig) -> None:
    model, size = read.model, (48, 80)
    denoiser, rows = model.load_denoiser(FP32(), CPU).eval(), dict[str, int]()
    for name, layer in denoiser.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith(denoiser.units):
            layer.register_forward_hook(lambda _, given, out, name=name: rows.update({name: given[0].shape[1]}))
    with torch.no_grad():
        model.predict(
            denoiser, torch.zeros(1, 128, 5, 3), torch.zeros(1), model.text.blank(torch.float32, 1), torch.float32
        )
    said = model.architecture.layer_rows(size)
    assert rows == {name: said(name) for name in rows} and len(set(rows.values())) == 3
