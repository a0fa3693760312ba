"""A tiny Qwen-Image against diffusers' transformer, autoencoder and pipeline, and its text side against theirs."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.config.family_defaults import with_family
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import FP32
from simpletune.models.objectives.flow import Flow
from simpletune.models.qwen_image.qwen_image_files import FIRST
from simpletune.models.qwen_image.qwen_image_option import QwenImage
from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.models.text.prompts import Prompts
from simpletune.models.text.qwen25 import AFTER, BEFORE, DROPPED
from simpletune.runs.report.settings import settings_of
from simpletune.stages.sample import ImageRequest, Sampler, noises
from simpletune.stages.step.synthetic import CPU
from simpletune.system.options import UserError

PROMPTS = ("a red dot", " ", "Zwei Zeilen\nund ein 🐕, der bellt", "\n odd", "many words " * 60)
"""The last is cut."""


@pytest.fixture
def read(qwen_config: dict[str, Any]) -> TrainConfig:
    return validate(qwen_config, "qwen")


@pytest.fixture(scope="module")
def pipeline(qwen: Path) -> QwenImagePipeline:
    found = QwenImagePipeline.from_pretrained(qwen, local_files_only=True)
    found.set_progress_bar_config(disable=True)
    return found


def encoded(model: Any, prompts: tuple[str, ...] = PROMPTS) -> list[Conditioning]:
    side = Prompts(model.text, torch.float32)
    (encoder,) = side.encoders
    return [side.assemble({"qwen25": each}) for each in side.encode(encoder, prompts, CPU)]


def random_text(*lengths: int) -> Conditioning:
    draw = torch.Generator().manual_seed(3)
    return stack([Conditioning(torch.randn(length, 32, generator=draw)) for length in lengths])


def test_prompts_are_the_pipelines_bit_for_bit(read: TrainConfig, pipeline: QwenImagePipeline) -> None:
    """Each alone, whatever else is encoded with it: template, what is dropped and cut, the states after the norm."""
    for prompt, own in zip(PROMPTS, encoded(read.model), strict=True):
        theirs, mask = pipeline.encode_prompt(prompt, max_sequence_length=64)
        assert mask is None and own.mask is None
        if prompt == PROMPTS[-1]:  # which the pipeline cuts after it was encoded, in a batch of other bits
            torch.testing.assert_close(own.embeds, theirs[0], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(own.embeds, theirs[0]), prompt
    assert len(own.embeds) == 64


def test_an_empty_prompt_is_one_space_as_the_negative_prompt_is(read: TrainConfig) -> None:
    """So what caption dropout trains is what guidance steers away from."""
    empty, space = encoded(read.model, ("", " "))
    assert torch.equal(empty.embeds, space.embeds)
    assert read.validation.negative_prompt == read.model.text.steered_from(None) == " "
    assert read.model.text.steered_from("rain") == "rain"


def test_names_of_either_kind_of_file_and_no_other_tensor_is_read(
    read: TrainConfig, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has the language model in the whole one; what it writes has neither that name nor the tower's."""
    folder = shutil.copytree(qwen, tmp_path / "pipeline")
    file = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}, file)
    model = read.model.model_copy(update={"pretrained": str(folder)})
    for ours, other in zip(encoded(read.model), encoded(model), strict=True):
        assert torch.equal(ours.embeds, other.embeds)
    (encoder,) = model.text.encoders
    opened: Any = encoder.open(model.files.part("text_encoder"), torch.float32, CPU, None)
    assert len(opened.tensors.shapes) == 2 + 3 * 12 and opened.parameter_count() < sum(
        map(Tensor.numel, tensors.values())
    )


def test_a_tokenizer_of_another_model_is_refused(qwen: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen / "tokenizer", tmp_path / "tokenizer")
    lines = (folder / "merges.txt").read_text().splitlines()
    (folder / "merges.txt").write_text("\n".join(lines[:40]) + "\n")
    (encoder,) = QwenImage().text.encoders
    with pytest.raises(UserError, match="of the beginning of Qwen-Image's template, whose tokenizer makes 34. Use the"):
        encoder.read_tokenizer(folder)


@pytest.mark.data
def test_the_real_tokenizer_reads_the_template_as_the_tiny_one(real_data: Path, qwen: Path) -> None:
    (encoder,) = QwenImage().text.encoders
    folder = real_data / "families" / "qwen_image_config" / "tokenizer"
    real, tiny = encoder.read_tokenizer(folder), encoder.read_tokenizer(qwen / "tokenizer")
    for tokenizer in (real, tiny):
        assert len(tokenizer(BEFORE).input_ids) == DROPPED and len(tokenizer(AFTER).input_ids) == 5
        assert encoder.counts(tokenizer, [" "]) == [6]
    assert (encoder.limit, encoder.longest({})) == (546, 546)


@pytest.mark.data
def test_the_published_text_encoder_is_made_of_its_own_configuration(real_data: Path) -> None:
    """28 layers of 233,057,792 parameters, with the published rotations."""
    config = json.loads((real_data / "families" / "qwen_image_config" / "text_encoder" / "config.json").read_bytes())
    shipped = QwenImage().files.known_part("text_encoder").config()
    texts = [Qwen2_5_VLConfig.from_dict(each).get_text_config() for each in (config, shipped)]
    assert texts[0].to_dict() == texts[1].to_dict()
    with torch.device("meta"):
        model = Qwen2_5_VLTextModel(texts[0])
    assert sum(each.numel() for each in model.parameters()) == 7_070_619_136
    assert {sum(each.numel() for each in layer.parameters()) for layer in model.layers} == {233_057_792}
    assert model.rotary_emb.mrope_section == [16, 24, 24]


@pytest.mark.parametrize("size", [(10, 6), (2, 14), (16, 16)], ids=str)
@pytest.mark.parametrize("lengths", [(13, 13), (9, 20)], ids=str)
def test_predictions_are_the_transformers(
    read: TrainConfig, pipeline: QwenImagePipeline, size: tuple[int, int], lengths: tuple[int, int]
) -> None:
    """Of a batch, packed by the pipeline's own code, with odd numbers of tokens a side; masked only if texts differ."""
    draw, (h, w) = torch.Generator().manual_seed(1), size
    z, sigma, text = torch.randn(2, 16, h, w, generator=draw), torch.tensor([0.7503, 0.1]), random_text(*lengths)
    assert (text.mask is None) == (lengths[0] == lengths[1])
    with torch.no_grad():
        model = read.model.load_denoiser(FP32(), CPU).eval()
        ours = read.model.predict(model, z, sigma, text, torch.float32)
        theirs = pipeline.transformer(
            hidden_states=pipeline._pack_latents(z, 2, 16, h, w), timestep=sigma, encoder_hidden_states=text.embeds,
            encoder_hidden_states_mask=text.mask, img_shapes=[[(1, h // 2, w // 2)]] * 2, return_dict=False,
        )[0]  # fmt: skip
    wanted = pipeline._unpack_latents(theirs, 8 * h, 8 * w, 8)[:, :, 0]
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_a_sample_of_a_batch_is_what_it_is_alone(read: TrainConfig) -> None:
    lengths, draw = (7, 40, 23, 1), torch.Generator().manual_seed(1)
    z, time = torch.randn(4, 16, 6, 10, generator=draw), torch.tensor([0.1, 0.5, 0.9, 0.3])
    text, denoiser = random_text(*lengths), read.model.load_denoiser(FP32(), CPU).eval()
    with torch.no_grad():
        whole = read.model.predict(denoiser, z, time, text, torch.float32)
        for number, length in enumerate(lengths):
            one = Conditioning(text.embeds[[number], :length])
            alone = read.model.predict(denoiser, z[[number]], time[[number]], one, torch.float32)
            torch.testing.assert_close(whole[[number]], alone, rtol=1e-5, atol=2e-6)


def test_a_picture_is_that_of_the_pipeline(read: TrainConfig, pipeline: QwenImagePipeline) -> None:
    """Of odd sides: levels whose shift depends on tokens and that end early, guidance of the norm without it, means and
    deviations by channel."""
    model, request = read.model, ImageRequest("", 0, "", 80, 48, 5, 4.0)
    positive, negative = encoded(model, ("a red dot of a longer name", " "))
    assert len(positive.embeds) > len(negative.embeds)
    sampler = Sampler(model.load_denoiser(FP32(), CPU).eval(), model, FP32(), objective=read.objective)
    with torch.no_grad():
        z = sampler.denoise([request], [positive], [negative])
        found = model.autoencoder.decode(model.autoencoder.load(CPU, torch.float32), z)
    start = noises(request, model).start
    wanted = pipeline(
        prompt="a red dot of a longer name", negative_prompt=" ", true_cfg_scale=4.0, num_inference_steps=5,
        latents=pipeline._pack_latents(start, 1, 16, 6, 10), height=48, width=80, max_sequence_length=64,
        output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_are_those_of_diffusers_script(read: TrainConfig, qwen: Path) -> None:
    """The arithmetic of train_dreambooth_lora_qwen_image.py."""
    draw, index = torch.Generator().manual_seed(2), torch.tensor([250, 900])
    pixels, text = torch.rand(2, 3, 48, 80, generator=draw) * 2 - 1, random_text(9, 20)
    noise = torch.randn(2, 16, 6, 10, generator=draw)

    vae = AutoencoderKLQwenImage.from_pretrained(qwen / "vae").eval()
    theirs = QwenImageTransformer2DModel.from_pretrained(qwen / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(qwen / "scheduler", shift_terminal=None)
    with torch.no_grad():
        x = vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
    mean, deviation = (
        torch.tensor(each).view(1, -1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    x = (x - mean) * (1.0 / deviation)
    sigmas = scheduler.sigmas[index].view(-1, 1, 1, 1)
    z_t = (1.0 - sigmas) * x + sigmas * noise
    predicted = theirs(
        hidden_states=QwenImagePipeline._pack_latents(z_t, 2, 16, 6, 10), timestep=scheduler.timesteps[index] / 1000,
        encoder_hidden_states=text.embeds, encoder_hidden_states_mask=text.mask, img_shapes=[[(1, 3, 5)]] * 2,
        return_dict=False,
    )[0]  # fmt: skip
    predicted = QwenImagePipeline._unpack_latents(predicted, 48, 80, 8)[:, :, 0]
    wanted = ((predicted.float() - (noise - x).float()) ** 2).reshape(2, -1).mean(1).mean()
    wanted.backward()

    model, process = read.model, read.objective.process(read.model.files.scheduler_config, read.model.flow)
    z_0 = model.autoencoder.encode(model.autoencoder.load(CPU, torch.float32), pixels)
    torch.testing.assert_close(z_0, x, rtol=1e-6, atol=1e-6)
    denoiser, level = model.load_denoiser(FP32(), CPU).train().requires_grad_(True), scheduler.sigmas[index]
    z_t = process.noised(z_0, noise, level)
    predicted = model.predict(denoiser, z_t, process.time(level), text, torch.float32)
    loss = process.loss(predicted, process.target(z_0, noise, level), level)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    own = dict(denoiser.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:  # of the last block's text, which nothing reads
            assert own[name].grad is None and name.startswith("transformer_blocks.2."), name
            continue
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=3e-5 * largest)


def test_the_published_models() -> None:
    """By what ships, without a download."""
    model = QwenImage()
    network = model.architecture
    assert network.parameter_count() == 20_430_401_088
    assert (network.blocks(), model.text.width, model.text.tokens) == (60, 3584, 512)
    assert network.in_channels == network.out_channels == 16 and not model.inpaints
    assert model.autoencoder.shape(1328, 1024) == (16, 128, 166)
    linear = {name.removesuffix(".weight"): s for name, s in network.known_shapes().items() if len(s) == 2}
    counts = {}
    for name, pattern in model.lora[0].names.targets.items():
        found = [shape for layer, shape in linear.items() if pattern.search(layer)]
        counts[name] = len(found), round(sum(16 * sum(shape) for shape in found) / 1e6, 1)
    assert counts == {
        "attention_image": (240, 23.6), "attention": (480, 47.2), "attention_mlp": (720, 106.2),
        "all_linear": (840, 147.5),
    }  # fmt: skip
    modulation = network.modulation
    assert modulation is not None
    kept = sum(len(s) and torch.Size(s).numel() for name, s in network.known_shapes().items()
               if modulation.serves(name.rpartition(".")[0]))  # fmt: skip
    assert kept == pytest.approx(6_826e6, rel=1e-3)
    for name in (model.pretrained, FIRST):
        scheduler = model.model_copy(update={"pretrained": name}).files.scheduler_config()
        for size, shift in (((1024, 1024), 2.0), ((1328, 1328), 2.3)):
            count = partial(network.image_tokens, size)
            levels = Flow().solver({**scheduler, "shift_terminal": None}, 50, 0, model.flow, count).levels
            assert float(levels[25] / (1 - levels[25])) == pytest.approx(shift, abs=0.01)
            last = Flow().solver(scheduler, 50, 0, model.flow, count).levels[-1]
            assert float(last) == pytest.approx(0.02)


@pytest.mark.parametrize("method", ["lora", "dora", "lokr", "loha", "oft", None])
def test_a_method_begins_with_the_pictures_attention(method: str | None) -> None:
    """Both streams on request; a run's report knows the default."""

    def of(**adapter: object) -> TrainConfig:
        section = {} if method is None else {"adapter": {"method": method, **adapter}}
        data = {"name": "tiny", "model": {"family": "qwen_image"}, "data": {"path": "demo:pictures"}}
        return validate(data | section, "tiny")

    def shown(config: TrainConfig) -> tuple[str, str, bool]:
        (row,) = (row for row in settings_of(config, {}) if row.path == "adapter.targets")
        return row.value, row.default, row.changed

    assert shown(of()) == ("attention_image", "attention_image", False)
    adapter = of().adapter
    assert isinstance(adapter, TargetedMethod)
    assert len(adapter.modules(QwenImage().architecture.known_shapes())) == 240
    if method is not None:
        assert shown(of(targets="attention")) == ("attention", "attention_image", True)


@pytest.mark.parametrize("method", ["full", "partial", "hypernetwork", "none"])
def test_methods_without_targets_get_none(method: str) -> None:
    assert "targets" not in with_family({"model": {"family": "qwen_image"}, "adapter": {"method": method}})["adapter"]


def test_each_layer_sees_the_rows_that_are_said_of_it(read: TrainConfig) -> None:
    model, size = read.model, (48, 80)
    denoiser, rows = model.load_denoiser(FP32(), CPU).eval(), dict[str, int]()
    for name, layer in denoiser.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith(denoiser.units) and "_mod" not in name:
            layer.register_forward_hook(lambda _, given, out, name=name: rows.update({name: given[0].shape[1]}))
    with torch.no_grad():
        text = model.text.blank(torch.float32, 1)
        model.predict(denoiser, torch.zeros(1, 16, 10, 6), torch.zeros(1), text, torch.float32)
    said = model.architecture.layer_rows(size)
    assert rows == {name: said(name) for name in rows} and set(rows.values()) == {15, 64}
    (shape,) = model.architecture.attentions(size)
    assert shape == (3, 79, 79, 16)
