"""UNets of nine channels: recognised in every form, made from plain ones, their arithmetic, LoRAs for the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import original_layout
import original_sd15
import original_sdxl
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import StableDiffusionInpaintPipeline, UNet2DConditionModel
from original_layout import state_of
from safetensors.torch import load_file
from torch import Tensor

from simpletune.adapters.files import attach
from simpletune.adapters.files.base_reader import BaseReader
from simpletune.adapters.files.merge import Merger
from simpletune.adapters.files.updates import LoraUpdate, Update, without_other_input
from simpletune.adapters.methods.full import Full
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import FP32, Int8
from simpletune.estimate.generate_memory import generation_bytes
from simpletune.models.families import family_of
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.family import Family
from simpletune.models.text.clip import load_text_model
from simpletune.runs import stack
from simpletune.runs.stack import Stack, read_stack
from simpletune.stages.sample import ImageRequest
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.train_step import assemble
from simpletune.system.model_folder import weight_files
from simpletune.system.options import ConfigError, UserError
from simpletune.training import start_lora
from simpletune.training.start_lora import read_start

CPU = torch.device("cpu")
OPTIONS: dict[str, type[SD15 | SDXL]] = {"sd15": SD15, "sd2": SD15, "sdxl": SDXL}
WRITERS: dict[str, Any] = {"sd15": original_sd15, "sd2": original_sd15, "sdxl": original_sdxl}
WEIGHT = "conv_in.weight"
ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def pipeline(unet_pipeline: Callable[..., Path]) -> Callable[..., Path]:
    """A tiny pipeline by version, plain or with nine channels."""
    return lambda version, inpainting=True: unet_pipeline(f"inpainting-{version}" if inpainting else version)


def predicted(family: Family, model: Any, z_t: Tensor) -> Tensor:
    """What a model predicts for seeded prompts."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randn(2, 77, family.text.width, generator=generator)
    pooled = torch.randn(2, family.text.pooled_width, generator=generator) if family.text.pooled_width else None
    text = Conditioning(prompts, pooled=pooled)
    if family.text.reads_framing:
        text = replace(text, extra={"time_ids": torch.randn(2, 6, generator=generator)})
    with torch.no_grad():
        return family.predict(model, z_t, torch.tensor([40.0, 700.0]), text, torch.float32)


def input_of(*, channels: int = 9) -> Tensor:
    return torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(channels))


@pytest.mark.parametrize("version", ["sd15", pytest.param("sd2", marks=pytest.mark.slow), "sdxl"])
def test_a_single_file_is_recognised_and_written_back(version: str, pipeline: Callable, tmp_path: Path) -> None:
    folder = pipeline(version)
    file = WRITERS[version].write(folder, tmp_path / "model.safetensors")
    text = original_layout.without_weights(folder, tmp_path / "text")
    single = OPTIONS[version](pretrained=str(file), text_encoders=str(text))
    assert list(single.files.problems()) == [] and single.inpaints and single.autoencoder.channels == 4
    assert family_of(str(file)) == family_of(str(folder)) == type(single)()
    expected = state_of(folder / "unet")
    torch.testing.assert_close(dict(single.load_denoiser(FP32(), CPU).state_dict()), expected, rtol=0, atol=0)
    beside = OPTIONS[version](pretrained=str(folder), unet=str(file))
    assert beside.inpaints and beside.architecture.new_weights is None
    whole = shutil.copytree(folder, tmp_path / "whole")
    scheduler = whole / "scheduler/scheduler_config.json"
    noise = json.loads(scheduler.read_text()) | {"prediction_type": "epsilon"}  # as a real one; the tiny 2.1 predicts v
    scheduler.write_text(json.dumps(noise))
    Merger(BaseReader(str(whole)), [], None).write_file(tmp_path / "back.safetensors", {}, lambda: None)
    written, original = (load_file(each) for each in (tmp_path / "back.safetensors", file))
    for name in (name for name in written if name.startswith(original_sd15.UNET)):
        torch.testing.assert_close(written[name], original[name], rtol=0, atol=0)
    assert written[original_sd15.UNET + "input_blocks.0.0.weight"].shape[1] == 9


def test_a_file_of_stable_diffusion_2_that_inpaints_predicts_epsilon(pipeline: Callable, tmp_path: Path) -> None:
    """The pipeline with its text encoder may be 2.1's, which predicts v."""
    for inpainting, predicts, by in ((True, "epsilon", "the file's shapes"), (False, "v_prediction", None)):
        folder = pipeline("sd2", inpainting)
        file = original_sd15.write(folder, tmp_path / f"{inpainting}.safetensors")
        text = original_layout.without_weights(folder, tmp_path / f"text-{inpainting}")
        option = SD15(pretrained=str(file), text_encoders=str(text))
        assert option.files.scheduler_config()["prediction_type"] == predicts
        assert option.files.schedule_source() == (by or "the scheduler config in model.text_encoders")
    with pytest.raises(UserError, match="predicts v, but every reader .* Write a folder"):
        Merger(BaseReader(str(pipeline("sd2"))), [], None).write_file(tmp_path / "v.safetensors", {}, lambda: None)
    (problem,) = SD15(pretrained=str(tmp_path / "True.safetensors")).files.problems()
    assert "such as sd2-community/stable-diffusion-2-inpainting;" in problem.message


@pytest.mark.parametrize(
    ("option", "pipeline_class"),
    [
        (SD15(pretrained="stable-diffusion-v1-5/stable-diffusion-inpainting"), "StableDiffusionInpaintPipeline"),
        (SD15(inpainting=True), "StableDiffusionInpaintPipeline"),
        (SD15(), "StableDiffusionPipeline"),
        (SDXL(pretrained="diffusers/stable-diffusion-xl-1.0-inpainting-0.1"), "StableDiffusionXLInpaintPipeline"),
        (SDXL(inpainting=True), "StableDiffusionXLInpaintPipeline"),
    ],
)
def test_known_names_and_their_pipelines(option: Family, pipeline_class: str) -> None:
    inpaints = "Inpaint" in pipeline_class
    assert option.inpaints is inpaints and option.pipeline == pipeline_class
    assert option.architecture.known_shapes()[WEIGHT] == (320, 9 if inpaints else 4, 3, 3)
    assert option.autoencoder.shape(64, 128) == (4, 16, 8)


@pytest.mark.parametrize("version", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_a_widened_unet_first_predicts_what_it_did(version: str, pipeline: Callable, tmp_path: Path) -> None:
    folder = pipeline(version, inpainting=False)
    plain, wide = (OPTIONS[version](pretrained=str(folder), inpainting=inpainting) for inpainting in (False, True))
    assert (plain.architecture.new_weights, wide.architecture.new_weights, wide.inpaints) == (None, WEIGHT, True)
    z_t, model = input_of(), wide.load_denoiser(FP32(), CPU)
    before = predicted(plain, plain.load_denoiser(FP32(), CPU), z_t[:, :4])
    torch.testing.assert_close(predicted(wide, model, z_t), before, rtol=1e-5, atol=1e-6)
    assert model.state_dict()[WEIGHT].shape[1] == 9 == model.config.in_channels
    Full().export(model, tmp_path, {})
    again = OPTIONS[version](pretrained=str(folder), unet=str(tmp_path / "unet"), inpainting=True)
    assert again.architecture.new_weights is None and again.inpaints  # as the run's own options load its result
    assert dict(again.architecture.known_shapes()) == dict(wide.architecture.known_shapes())
    for each in (plain, wide):
        each.load_denoiser(Int8(), CPU, cache=tmp_path)
    assert len(list((tmp_path / "quantised").glob("*/transformer.safetensors"))) == 2
    cached = wide.load_denoiser(Int8(compute="fp32"), CPU, cache=tmp_path)
    assert cached.state_dict()[WEIGHT].shape[1] == 9


def test_random_weights_are_those_of_nine_channels(pipeline: Callable) -> None:
    option = SD15(pretrained=str(pipeline("sd15", inpainting=False)), init="random", inpainting=True)
    assert option.architecture.new_weights is None
    assert option.load_denoiser(FP32(), CPU).state_dict()[WEIGHT][:, 4:].std() > 0.01


def config_of(tiny_config: dict, folder: Path, **changes: Any) -> TrainConfig:
    model = {"family": "sd15", "pretrained": str(folder)} | changes.pop("model", {})
    data = tiny_config["data"] | {"resolution": 128}
    return validate(tiny_config | {"model": model, "data": data} | changes, "inpainting")


def test_what_begins_at_zero_has_to_train(tiny_config: dict, pipeline: Callable) -> None:
    def said(folder: Path, **changes: Any) -> list[str]:
        try:
            config_of(tiny_config, folder, model={"inpainting": True}, **changes)
        except ConfigError as error:
            return [str(each) for each in error.problems if each.path == "model.inpainting"]
        return []

    plain = pipeline("sd15", inpainting=False)
    remedy = r"Use adapter.method full, or partial with conv_in.weight in adapter.layers; or name an inpainting model"
    for adapter in ({"method": "lora"}, {"method": "partial"}, {"method": "dora", "targets": "all_linear"}):
        (problem,) = said(plain, adapter=adapter)
        assert f"adapter.method {adapter['method']} does not train conv_in.weight. {remedy}" in problem
    assert said(plain, adapter={"method": "full"}) == []
    wide = explain(config_of(tiny_config, plain, model={"inpainting": True}, adapter={"method": "full"}))
    assert "masked picture; conv_in.weight begins with zeros for them" in wide
    assert "masked picture\n" in explain(config_of(tiny_config, pipeline("sd15")))
    assert "inpaints" not in explain(config_of(tiny_config, plain))
    assert said(plain, adapter={"method": "partial", "layers": ["conv_in.*", "*.attn*"]}) == []
    assert said(pipeline("sd15"), adapter={"method": "lora"}) == [], "it has nine channels already"
    with pytest.raises(ConfigError, match=r"model\.inpainting: unknown field"):
        validate(tiny_config | {"model": tiny_config["model"] | {"inpainting": True}}, "sd3")


@pytest.mark.parametrize(
    "memory",
    [{}, {"checkpointing": "all", "resident_blocks": 1, "offload_checkpoint_inputs": True}],
    ids=["plain", "offloaded"],
)
def test_loss_and_gradients_equal_diffusers(memory: dict, tiny_config: dict, pipeline: Callable) -> None:
    """With the mask and the masked picture's latents after z_t, as ``StableDiffusionInpaintPipeline`` concatenates."""
    folder, generator = pipeline("sd15"), torch.Generator().manual_seed(0)
    partly = {"method": "partial", "layers": ["conv_in.*", "*.attn2.*"]} if not memory else {"method": "lora"}
    config = config_of(tiny_config, folder, adapter=partly, memory=tiny_config["memory"] | memory)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    z_0, noise, text, painted = drawn(2, 4, 16, 16), drawn(2, 4, 16, 16), drawn(2, 77, 32), drawn(2, 5, 16, 16)
    level = torch.tensor([40, 700])
    unet = config.model.load_denoiser(
        config.precision, CPU, on_host=config.memory.host_filter(config.model.architecture.units())
    )
    step = assemble(config, unet, Accelerator(cpu=True))
    batch = Batch(z_0, noise, level.float(), Conditioning(text), ("a", "b"), inpainting=painted)
    loss = step.compute(batch)
    ours = {name: p.grad for name, p in unet.named_parameters() if p.requires_grad}

    other = UNet2DConditionModel.from_pretrained(folder / "unet").requires_grad_(False)
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept_share = (1 - betas).cumprod(0)[level].view(-1, 1, 1, 1)
    z_t = (kept_share.sqrt() * z_0 + (1 - kept_share).sqrt() * noise).float()
    if memory:
        config.adapter.attach(other, config.train.seed)
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(name in ours)
    wanted = F.mse_loss(other(torch.cat([z_t, painted], 1), level, text).sample, noise)
    wanted.backward()
    theirs = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys() and (memory or WEIGHT in ours)
    norm = torch.nn.utils.get_total_norm(list(theirs.values())).item()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * max(norm, 1))


def test_diffusers_pipeline_loads_a_result_beside_its_base(pipeline: Callable, tmp_path: Path) -> None:
    folder = pipeline("sd15", inpainting=False)
    model = SD15(pretrained=str(folder), inpainting=True).load_denoiser(FP32(), CPU)
    Full().export(model, tmp_path, {})
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    index = json.loads((base / "model_index.json").read_text())
    (base / "model_index.json").write_text(json.dumps(index | {"_diffusers_version": "0.30.0"}))  # as published ones
    unet = UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    loaded = StableDiffusionInpaintPipeline.from_pretrained(base, unet=unet, safety_checker=None)
    assert loaded.unet.config.in_channels == 9 and loaded.vae.config.latent_channels == 4


def test_a_folder_whose_only_safetensors_are_in_half_precision(pipeline: Callable, tmp_path: Path) -> None:
    folder, half = pipeline("sd15"), tmp_path / "half"
    shutil.copytree(folder, half)
    for file in half.glob("*/*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))
    option = SD15(pretrained=str(half))
    assert list(option.files.problems()) == []
    for part, loaded in {
        "unet": option.load_denoiser(FP32(), CPU),
        "vae": option.autoencoder.load(CPU, torch.float32),
        "text_encoder": load_text_model(option.files.part("text_encoder"), torch.float32, projected=False),
    }.items():
        expected = {name.removeprefix("text_model."): tensor for name, tensor in state_of(folder / part).items()}
        expected.pop("embeddings.position_ids", None)
        torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=0)
    shutil.copyfile(folder / "vae" / "diffusion_pytorch_model.safetensors", half / "vae" / "model.safetensors")
    assert [file.name for file in weight_files(half / "vae")] == ["model.safetensors"], "full precision comes first"


def update(inputs: int, outputs: int = 32, rank: int = 2) -> Update:
    generator = torch.Generator().manual_seed(inputs)
    return LoraUpdate(torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator))


@pytest.mark.parametrize(("given", "own"), [(4, 9), (9, 4)])
def test_a_lora_for_the_other_kind_applies_to_all_but_the_first_layer(
    given: int, own: int, pipeline: Callable, capsys: pytest.CaptureFixture
) -> None:
    folder = pipeline("sd15", inpainting=own == 9)
    inner = update(32)
    updates = {"conv_in": update(given * 9), ATTENTION: inner}
    base = BaseReader(str(folder))
    merger = Merger(base, [(updates, 1.0)], None)
    said = capsys.readouterr().out
    assert f"conv_in reads {given} channels and this model's {own}: one is for inpainting, the other not" in said
    assert "Left out, and the other 1 layer applied" in said
    assert merger.changed == {ATTENTION}
    torch.testing.assert_close(merger.get(WEIGHT), base.get(WEIGHT), rtol=0, atol=0)
    assert (merger.get(f"{ATTENTION}.weight") - base.get(f"{ATTENTION}.weight")).abs().max() > 0.1
    with pytest.raises(UserError, match=rf"the LoRA updates nothing else, and its conv_in reads {given} channels"):
        Merger(base, [({"conv_in": update(given * 9)}, 1.0)], None)


@dataclass
class Given:
    """Stands for ``GivenLora``: a LoRA for nine channels."""

    updates: dict[str, Update]
    place: str = "an option: painted"
    name: str = "painted"
    scale: float = 1.0
    file: Path = Path("painted.safetensors")

    def read(self) -> tuple[dict[str, Update], dict[str, Update]]:
        return self.updates, {}

    def about(self) -> dict:
        return {"sha256": "0", "scale": 1.0}


def test_loras_of_every_option_leave_out_the_first_layer(
    tiny_config: dict, pipeline: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    given = Given({"conv_in": update(81), ATTENTION: update(32)})
    for module in (stack, start_lora):
        monkeypatch.setattr(module, "given_lora", lambda *_: given)
    folder = pipeline("sd15", inpainting=False)
    on_top = config_of(tiny_config, folder, model={"loras": ["painted"]})
    (merged,) = read_stack(on_top).loras  # type: ignore[union-attr]
    assert merged[0].keys() == {ATTENTION}
    begun = read_start(config_of(tiny_config, folder, adapter={"method": "lora", "rank": 2, "start": "painted"}))
    assert begun is not None and begun.updates.keys() == {ATTENTION}
    model, honest = on_top.model.model_copy(update={"loras": []}).load_denoiser(FP32(), CPU), attach.layer_shapes
    monkeypatch.setattr(attach, "layer_shapes", lambda model: {**honest(model), "conv_in": (32, 4, 3, 3)})
    monkeypatch.setattr(attach, "holds_hypernetwork", lambda file: False)
    monkeypatch.setattr(attach, "open_lora", lambda file: SimpleNamespace(family=SimpleNamespace(model="")))
    monkeypatch.setattr(attach, "read_lora", lambda header: given.updates)
    attach.load_loras(model, [(given.file, 1.0)])
    assert {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name} == {ATTENTION}
    assert capsys.readouterr().out.count("conv_in reads 9 channels and this model's 4") == 3


def test_loras_are_merged_before_a_unet_is_widened(pipeline: Callable) -> None:
    folder = pipeline("sd15", inpainting=False)
    option = SD15(pretrained=str(folder), inpainting=True, loras=["a"])
    found = option.load_denoiser(FP32(), CPU, overlay=Stack([({ATTENTION: update(32)}, 1.0)], [])).state_dict()
    expected, added = state_of(folder / "unet"), update(32).delta()
    torch.testing.assert_close(found[f"{ATTENTION}.weight"], expected[f"{ATTENTION}.weight"] + added)
    torch.testing.assert_close(found[WEIGHT], F.pad(expected[WEIGHT], (0, 0, 0, 0, 0, 5)), rtol=0, atol=0)


def test_other_differences_of_the_first_layer_are_left_to_the_check_of_shapes() -> None:
    updates = {"conv_in": update(5 * 9), ATTENTION: update(32)}
    assert without_other_input("a", updates, {"conv_in": (32, 9, 3, 3)}) == updates
    assert without_other_input("a", {"conv_in": update(81)}, {"conv_in": (32, 9, 3, 3)}).keys() == {"conv_in"}
    assert without_other_input("a", {ATTENTION: update(32)}, {"conv_in": (32, 9, 3, 3)}).keys() == {ATTENTION}


@pytest.mark.slow
def test_predictions_of_drawing_and_training_have_nine_channels(
    tiny_config: dict, pipeline: Callable, simulate_once: Callable
) -> None:
    request = ImageRequest("", 0, width=128, height=128, steps=2)
    plain, inpainting = (config_of(tiny_config, pipeline("sd15", inpainting=each)) for each in (False, True))
    one, other = (generation_bytes(config, request, FP32(), 2) for config in (plain, inpainting))
    assert other - one >= 5 * 9 * 32 * 4  # the weight's, and the input's
    between = [simulate_once(config).steady.bytes for config in (plain, inpainting)]
    assert between[1] - between[0] == pytest.approx(5 * 9 * 32 * 4, abs=1024)  # the allocator's blocks
