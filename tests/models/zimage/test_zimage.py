"""A tiny Z-Image against diffusers' transformer, pipeline and training script, and its text side against theirs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

from benchmarks.tiny_models import tiny_klein, tiny_zimage
from simpletune.commands.inspect_data.prompt_cuts import Cutter, token_counts
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import FP32
from simpletune.models.objectives.flow import Flow
from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.models.text.prompts import Prompts
from simpletune.models.zimage.zimage_files import TURBO, padded
from simpletune.models.zimage.zimage_option import ZImage
from simpletune.models.zimage.zimage_text import ZImageText
from simpletune.stages.sample import ImageRequest, Sampler, noises
from simpletune.stages.step.synthetic import CPU

PROMPTS = ("a red dot", "", " Zwei Zeilen\nund ein 🐕, der bellt", "many words " * 60)
"""Of 17, 8, 43 and more than 96 tokens; the last is cut."""


@pytest.fixture
def read(zimage_config: dict[str, Any]) -> TrainConfig:
    return validate(zimage_config, "zimage")


@pytest.fixture(scope="module")
def pipeline(zimage: Path) -> ZImagePipeline:
    return quiet(zimage)


def quiet(folder: Path) -> ZImagePipeline:
    found = ZImagePipeline.from_pretrained(folder, local_files_only=True)
    found.set_progress_bar_config(disable=True)
    return found


def encoded(model: Any, prompts: tuple[str, ...] = PROMPTS) -> list[Conditioning]:
    side = Prompts(model.text, torch.float32)
    (encoder,) = side.encoders
    return [side.assemble({"qwen3": each}) for each in side.encode(encoder, prompts, CPU)]


def random_text(*lengths: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(length, 32, generator=draw) for length in lengths]


def assembled(model: Any, texts: list[torch.Tensor]) -> Conditioning:
    return stack([model.text.assemble({"qwen3": {"hidden": text}}) for text in texts])


def test_prompts_are_the_pipelines_without_padding(read: TrainConfig, pipeline: ZImagePipeline) -> None:
    """Each alone, whatever else is encoded with it: template, cut, and the states before the last layer."""
    theirs, _ = pipeline.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False, max_sequence_length=96)
    for prompt, own, other in zip(PROMPTS, encoded(read.model), theirs, strict=True):
        length = int(own.extra["tokens"])
        assert own.embeds.shape == (padded(len(other)), 32) and own.mask is None and length == len(other), prompt
        torch.testing.assert_close(own.embeds[:length], other, rtol=1e-5, atol=1e-5)
        assert not own.embeds[length:].any()


@pytest.mark.parametrize("size", [(10, 6), (2, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("lengths", [(13, 20), (13, 40), (32, 8)], ids=str)
def test_predictions_are_the_transformers(
    read: TrainConfig, pipeline: ZImagePipeline, size: tuple[int, int], lengths: tuple[int, int]
) -> None:
    """Of a batch whose texts differ in length, before and after padding, with and without padding of the picture."""
    texts, draw = random_text(*lengths), torch.Generator().manual_seed(1)
    z, time = torch.randn(2, 16, *size, generator=draw), torch.tensor([0.7503, 0.1])
    text = assembled(read.model, texts)
    assert (text.mask is None) == (padded(lengths[0]) == padded(lengths[1]))
    with torch.no_grad():
        model = read.model.load_denoiser(FP32(), CPU).eval()
        ours = read.model.predict(model, z, time, text, torch.float32)
        theirs = pipeline.transformer(list(z.unsqueeze(2)), time, texts, return_dict=False)[0]
    torch.testing.assert_close(ours, torch.stack(theirs).squeeze(2), rtol=1e-5, atol=2e-6)


def test_a_sample_of_a_batch_is_what_it_is_alone(read: TrainConfig) -> None:
    texts, draw = random_text(7, 40, 70, 33), torch.Generator().manual_seed(1)
    z, time = torch.randn(4, 16, 6, 10, generator=draw), torch.tensor([0.1, 0.5, 0.9, 0.3])
    model, denoiser = read.model, read.model.load_denoiser(FP32(), CPU).eval()
    with torch.no_grad():
        whole = model.predict(denoiser, z, time, assembled(model, texts), torch.float32)
        for number, text in enumerate(texts):
            one = assembled(model, [text])
            alone = model.predict(denoiser, z[[number]], time[[number]], one, torch.float32)
            torch.testing.assert_close(whole[[number]], alone, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shift", [6.0, 3.0], ids=["base", "turbo"])
def test_a_picture_is_that_of_the_pipeline(
    shift: float, read: TrainConfig, zimage: Path, tmp_path: Path, pipeline: ZImagePipeline
) -> None:
    """Of odd sides: noise levels with the scheduler's shift, guidance by one less, sign and statistics of latents."""
    model = read.model
    if shift != 6.0:
        folder = tiny_zimage.build(tmp_path / "turbo", shift=shift)
        model, pipeline = model.model_copy(update={"pretrained": str(folder)}), quiet(folder)
    guidance = 4.0 if shift == 6.0 else 1.0
    request = ImageRequest("", 0, "", 80, 48, 5, guidance)
    positive, negative = encoded(model, ("a red dot of a longer name", ""))
    assert len(positive.embeds) > len(negative.embeds)
    sampler = Sampler(model.load_denoiser(FP32(), CPU).eval(), model, FP32(), objective=read.objective)
    with torch.no_grad():
        z = sampler.denoise([request], [positive], [negative])
        found = model.autoencoder.decode(model.autoencoder.load(CPU, torch.float32), z)
    wanted = pipeline(
        prompt="a red dot of a longer name", latents=noises(request, model).start, height=48, width=80,
        num_inference_steps=5, guidance_scale=guidance + model.words.pipeline.guidance_offset, max_sequence_length=96,
        output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_are_those_of_diffusers_script(read: TrainConfig, zimage: Path) -> None:
    """The arithmetic of train_dreambooth_lora_z_image.py."""
    draw, index = torch.Generator().manual_seed(2), torch.tensor([250, 900])
    pixels, texts = torch.rand(2, 3, 48, 80, generator=draw) * 2 - 1, random_text(9, 40)
    noise = torch.randn(2, 16, 6, 10, generator=draw)

    vae = AutoencoderKL.from_pretrained(zimage / "vae").eval()
    theirs = ZImageTransformer2DModel.from_pretrained(zimage / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(zimage / "scheduler")
    with torch.no_grad():
        x = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    sigmas = scheduler.sigmas[index].view(-1, 1, 1, 1)
    z_t = (1.0 - sigmas) * x + sigmas * noise
    times = (1000 - scheduler.timesteps[index]) / 1000
    predicted = -torch.stack(theirs(list(z_t.unsqueeze(2)), times, texts, return_dict=False)[0]).squeeze(2)
    wanted = ((predicted.float() - (noise - x).float()) ** 2).reshape(2, -1).mean(1).mean()
    wanted.backward()

    model, process = read.model, read.objective.process(read.model.files.scheduler_config, read.model.flow)
    z_0 = model.autoencoder.encode(model.autoencoder.load(CPU, torch.float32), pixels)
    torch.testing.assert_close(z_0, x, rtol=1e-6, atol=1e-6)
    denoiser, level = model.load_denoiser(FP32(), CPU).train().requires_grad_(True), scheduler.sigmas[index]
    z_t = process.noised(z_0, noise, level)
    predicted = model.predict(denoiser, z_t, process.time(level), assembled(model, texts), torch.float32)
    loss = process.loss(predicted, process.target(z_0, noise, level), level)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    own = dict(denoiser.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=3e-5 * largest)


def test_one_step_of_a_perfect_model_ends_at_the_picture(read: TrainConfig) -> None:
    """Sign and time: a network that knows z_0 is asked once, at time 0, from noise alone."""
    model, draw = read.model, torch.Generator().manual_seed(4)
    z_0, noise = torch.randn(1, 16, 4, 4, generator=draw), torch.randn(1, 16, 4, 4, generator=draw)
    solver = model.solver(read.objective, (32, 32), 1, 0)
    assert solver.times.tolist() == [0.0]
    torch.testing.assert_close(solver.step(z_0 - noise, 0, noise), z_0, rtol=1e-6, atol=1e-6)


def test_the_published_models() -> None:
    """By what ships, without a download."""
    model = ZImage()
    network = model.architecture
    assert network.parameter_count() == 6_154_908_736
    assert (network.blocks(), model.text.width, model.text.tokens) == (34, 2560, 512)
    assert model.autoencoder.shape(1024, 768) == (16, 96, 128)
    linear = {name.removesuffix(".weight"): s for name, s in network.known_shapes().items() if name.endswith(".weight")}
    counts = {}
    for name, pattern in model.lora[0].names.targets.items():
        found = [shape for layer, shape in linear.items() if pattern.search(layer) and len(shape) == 2]
        counts[name] = len(found), sum(16 * sum(shape) for shape in found)
    assert counts["attention"] == (136, 16_711_680)
    assert counts["attention_mlp"][0] == 238 and counts["all_linear"][0] == 270
    for name, shift in ((model.pretrained, 6.0), (TURBO, 3.0)):
        scheduler = model.model_copy(update={"pretrained": name}).files.scheduler_config()
        levels = Flow().solver(scheduler, 50, 0, model.flow, lambda: 4096).levels
        assert float(levels[25] / (1 - levels[25])) == pytest.approx(shift)


@pytest.mark.data
def test_the_real_tokenizer_reads_prompts_as_the_tiny_one(real_data: Path, zimage: Path) -> None:
    (encoder,) = ZImageText(ZImage()).encoders
    folder = real_data / "families" / "z_image_config" / "tokenizer"
    real, tiny = encoder.read_tokenizer(folder), encoder.read_tokenizer(zimage / "tokenizer")
    for prompt in PROMPTS[:3]:
        assert encoder.text(real, prompt) == encoder.text(tiny, prompt)
    assert encoder.tokenize(real, [""]).ids.tolist() == [[151644, 872, 198, 151645, 198, 151644, 77091, 198]]
    assert tiny_klein.CHAT.count("<think>") == 1


def test_each_layer_sees_the_rows_that_are_said_of_it(read: TrainConfig) -> None:
    model, size = read.model, (48, 80)
    denoiser, rows = model.load_denoiser(FP32(), CPU).eval(), dict[str, int]()
    for name, layer in denoiser.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith(denoiser.units) and "adaLN" not in name:
            layer.register_forward_hook(lambda _, given, out, name=name: rows.update({name: given[0].shape[1]}))
    with torch.no_grad():
        text = model.text.blank(torch.float32, 1)
        model.predict(denoiser, torch.zeros(1, 16, 10, 6), torch.zeros(1), text, torch.float32)
    said = model.architecture.layer_rows(size)
    assert rows == {name: said(name) for name in rows} and set(rows.values()) == {32, 96, 128}
    shapes = model.architecture.attentions(size)
    assert [shape.queries for shape in shapes] == [128, 96, 32] and all(shape.width == 16 for shape in shapes)


def test_a_batch_of_one_padded_length_has_no_mask(read: TrainConfig) -> None:
    """So attention takes its quickest kernel."""
    alike, other = assembled(read.model, random_text(20, 32, 1)), assembled(read.model, random_text(20, 33))
    assert alike.mask is None and alike.extra["tokens"].tolist() == [20, 32, 1]
    assert other.mask is not None and other.mask.sum(1).tolist() == [32, 64]
    blank = read.model.text.blank(torch.float32)
    assert replace(blank, extra={}).tensors().keys() == {"embeds"} and int(blank.extra["tokens"]) == 96


def test_where_a_prompt_is_cut_is_found_without_transformers(zimage: Path, tmp_path: Path) -> None:
    """With the template's tokens, by tokenizer.json alone, which published models have."""
    folder = shutil.copytree(zimage, tmp_path / "pipeline")
    given = {"name": "x", "model": {"family": "zimage", "pretrained": str(folder), "text_length": 32}}
    config = validate(given | {"data": {"path": "x"}}, "x", needs_data=False)
    (encoder,) = config.model.text.encoders
    tokenizer = encoder.read_tokenizer(folder / "tokenizer")
    prompts = ["", "a red dot", "a red dot of a longer name " * 3]
    assert token_counts(config, prompts) is None  # the tiny one has two files instead
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    counts = encoder.counts(tokenizer, prompts)
    assert token_counts(config, prompts) == counts and counts[0] > 8
    none, also, (cut,) = Cutter(config).cuts(prompts)
    assert not none and not also and (cut.encoder, cut.tokens, cut.limit) == ("Qwen3", counts[2], 32)
    assert len(tokenizer(encoder.template[0] + prompts[2][: cut.place]).input_ids) == 32
    assert [encoder.text(tokenizer, each) for each in prompts] == [each.join(encoder.template) for each in prompts]
