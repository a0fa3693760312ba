"""LoRA files of Stable Diffusion XL: kohya's original names, what diffusers and ComfyUI make of them, and other families."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import unet_lora_readers
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from reference.file_shapes import problem
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from simpletune.adapters.files.attach import load_loras, require_shapes
from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.header import LoraHeader
from simpletune.adapters.files.mix import Recipe, mix
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import file_tensors, write_lora
from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.text.update import TARGETS
from simpletune.apps.cli.main import main
from simpletune.models.families import FAMILIES
from simpletune.models.lora_names import family_of_config, families_of, names_of
from simpletune.models.sd15.lora_names import NAMES as SD15_NAMES
from simpletune.models.sd15.option import SD15
from simpletune.models.sdxl.lora_names import LAYOUTS, NAMES
from simpletune.models.sdxl.option import SDXL
from simpletune.models.shared.text_layers import text_key
from simpletune.system.options import UserError

KOHYA, ONETRAINER, DIFFUSERS, COMFY, PEFT, BARE = LAYOUTS
TINY: dict[str, Any] = {  # two levels of two layers, numbered as the real ones, and the width of the real text
    "sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 2,
    "attention_head_dim": (1, 2), "use_linear_projection": True, "cross_attention_dim": 2048,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 32,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
SD15_SIZES: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1,
    "attention_head_dim": 1, "cross_attention_dim": 768,
}  # fmt: skip
TEXT: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 1, "num_hidden_layers": 2,
                        "vocab_size": 50, "max_position_embeddings": 8, "projection_dim": 8}  # fmt: skip
CONDITIONS = {"text_embeds": torch.ones(2, 8), "time_ids": torch.arange(12.0).view(2, 6)}


def tiny(**changes: Any) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(**{**TINY, **changes}).requires_grad_(False)


def sd15() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(**SD15_SIZES).requires_grad_(False)


@torch.no_grad()
def predict(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    z_t, prompt = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 2048, generator=generator)
    prediction: Tensor = model(z_t, torch.tensor([3, 700]), prompt, added_cond_kwargs=CONDITIONS).sample
    return prediction


def close(actual: Tensor, expected: Tensor) -> None:
    """fp32, 1e-5 of the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def updates_of(model: nn.Module, targets: Any, alphas: int = 1) -> dict[str, LoraUpdate]:
    """Updates large enough to show, with as many ranks and scales."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {}
    for number, name in enumerate(Lora(targets=targets).modules(shapes)):
        o, i, *sides = shapes[f"{name}.weight"]
        r = 2 + number % alphas
        down, up = torch.randn(r, i, generator=generator), torch.randn(o, r, generator=generator)
        found[name] = LoraUpdate(down, 0.1 * up, (1 + number % alphas) / 2, pointwise=bool(sides))
    return found


def patched(model: nn.Module, updates: dict[str, LoraUpdate], prefix: str = "") -> Any:
    """W + scale B A, by the definition."""
    for name, update in updates.items():
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            inner = inner if hasattr(model, "text_model") else inner.removeprefix("text_model.")
            weight = model.get_parameter(f"{inner}.weight")
            weight.data += (update.scale * update.up @ update.down).view_as(weight)
    return model


def encoders() -> tuple[CLIPTextModel, CLIPTextModelWithProjection]:
    torch.manual_seed(1)
    config = CLIPTextConfig(**TEXT, bos_token_id=48, eos_token_id=49, pad_token_id=0)
    return CLIPTextModel(config).requires_grad_(False), CLIPTextModelWithProjection(config).requires_grad_(False)


@torch.no_grad()
def encoded(encoder: nn.Module) -> Tensor:
    states: Tensor = encoder(torch.tensor([[48, 7, 5, 49]]), output_hidden_states=True).hidden_states[-2]
    return states


def text_updates() -> dict[str, LoraUpdate]:
    generator = torch.Generator().manual_seed(2)
    layers = [f"text_model.encoder.layers.0.self_attn.{name}" for name in TARGETS["attention"]]
    layers.append("text_model.encoder.layers.0.mlp.fc1")
    return {
        f"{encoder}.{layer}": LoraUpdate(
            torch.randn(2, 8, generator=generator), torch.randn(16 if "fc1" in layer else 8, 2, generator=generator)
        )
        for encoder in ("text_encoder", "text_encoder_2")
        for layer in layers
    }


def in_diffusers(file: Path, model: UNet2DConditionModel) -> StableDiffusionXLPipeline:
    """diffusers' pipeline with a file loaded."""
    first, second = encoders()
    pipeline = StableDiffusionXLPipeline(None, first, second, None, None, model, EulerDiscreteScheduler())  # type: ignore[arg-type]
    pipeline.load_lora_weights(str(file))
    return pipeline


def original(layer: str) -> str:
    """The original name of an attention's layer, by counting the steps of two layers a level."""
    place, _, leaf = layer.partition(".attentions.")
    number, _, inner = leaf.partition(".")
    if place == "mid_block":
        return f"middle_block.1.{inner}"
    level = int(place.rpartition(".")[2])
    if place.startswith("down"):
        return f"input_blocks.{1 + 3 * level + int(number)}.1.{inner}"  # two layers and the downsampler a level
    return f"output_blocks.{3 * level + int(number)}.1.{inner}"


@functools.cache
def real_layers() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that kohya's scripts train in SDXL, by layer."""
    shapes = SDXL().known_shapes()
    return {name: shapes[f"{name}.weight"] for name in Lora(targets="all_linear").modules(shapes)}


def test_kohyas_names_are_722_of_the_unet_and_72_and_192_of_the_encoders() -> None:
    layers = real_layers()
    blocks = {layer.partition(".attn1.to_q")[0] for layer in layers if layer.endswith(".attn1.to_q")}
    assert (len(layers), len(blocks)) == (722, 70) and len(layers) == 10 * 70 + 22
    names = {KOHYA.spelt(KOHYA.module(layer)): layer for layer in layers}
    assert names == {original(layer).replace(".", "_"): layer for layer in layers} and len(names) == 722
    assert NAMES.original("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q") == (
        "input_blocks.4.1.transformer_blocks.0.attn1.to_q", None
    )  # fmt: skip
    assert NAMES.original("up_blocks.0.resnets.2.conv_shortcut")[0] == "output_blocks.2.0.skip_connection"
    assert NAMES.original("up_blocks.1.upsamplers.0.conv")[0] == "output_blocks.5.2.conv"
    with pytest.raises(KeyError):
        NAMES.original("down_blocks.0.attentions.0.proj_in")
    for part, count in (("text_encoder", 72), ("text_encoder_2", 192)):
        with torch.device("meta"):
            encoder = CLIPTextModel(CLIPTextConfig.from_dict(dict(SDXL().known_part(part).config())))
        own = [name for name, _ in encoder.named_modules() if name.endswith(TARGETS["attention_and_mlp"])]
        number = {"text_encoder": 1, "text_encoder_2": 2}[part]
        keys = {text_key(f"{part}.text_model.{name.removeprefix('text_model.')}", "down", "kohya") for name in own}
        assert len(keys) == count
        assert f"lora_te{number}_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight" in keys


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_names_every_layer_and_is_read_back(layout: Any) -> None:
    for layer in real_layers():
        assert layout.layers(layout.prefix + layout.spelt(layout.module(layer))) == (layer,)
    assert layout.layers(layout.prefix + layout.spelt("input_blocks.1.1.proj_in")) == ()


def test_a_run_leaves_kohyas_names_that_diffusers_and_comfyui_apply(tmp_path: Path) -> None:
    model = tiny()
    lora = Lora(rank=2, alpha=3.0, targets="all_linear", layers=[{"pattern": "mid", "rank": 3}])
    lora.attach(model, 0)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    file, expected = lora.export(model, tmp_path, {}), predict(model)
    tensors = load_file(file)
    assert len(tensors) == 3 * 6 * 12
    assert tensors["lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.alpha"].item() == 3.0
    assert (expected - predict(tiny())).abs().max() > 0.1
    close(predict(in_diffusers(file, tiny()).unet), expected)
    state = tiny().state_dict()
    names = {f"lora_unet_{original(layer).replace('.', '_')}": f"{layer}.weight" for layer in updates_of(tiny(), "all_linear")}
    changed, unused = unet_lora_readers.apply(state, tensors, names)
    theirs = tiny()
    theirs.load_state_dict(changed)
    assert unused == []
    close(predict(theirs), expected)
    again = tiny()
    load_loras(again, [(file, 1.0)])
    close(predict(again), expected)
    about = describe(file)
    assert (about["family"], about["layout"]) == ("Stable Diffusion XL", "kohya")
    assert {tool["tool"]: tool["loads"] for tool in about["tools"]} == dict.fromkeys(
        ("diffusers", "ComfyUI", "Forge", "simpletune"), "yes"
    )


@pytest.mark.parametrize("layout", ["kohya", "onetrainer", "diffusers", "comfy", "peft", "bare"])
def test_what_diffusers_makes_of_a_layout_is_what_inspect_says(layout: str, tmp_path: Path) -> None:
    updates = {**updates_of(tiny(), "attention_qv", alphas=3), **text_updates()}
    file = write_lora(updates, tmp_path / "x.safetensors", layout)
    again = read_lora(file)
    assert set(again) == set(updates)
    for layer, update in updates.items():
        torch.testing.assert_close(again[layer].delta(), update.delta())
    tools = {tool["tool"]: tool for tool in describe(file)["tools"]}
    assert tools["simpletune"]["loads"] == "yes" and LoraHeader(file).layout is next(x for x in LAYOUTS if x.name == layout)
    if tools["diffusers"]["loads"] == "refuses":
        with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
            in_diffusers(file, tiny())
        return
    pipeline = in_diffusers(file, tiny())
    loads = tools["diffusers"]["loads"] == "yes"
    close(predict(pipeline.unet), predict(patched(tiny(), {k: u for k, u in updates.items() if not k.startswith("text")}) if loads else tiny()))
    for name, plain in zip(("text_encoder", "text_encoder_2"), encoders(), strict=True):
        expected = encoded(patched(plain, updates, f"{name}.") if loads else plain)
        close(encoded(getattr(pipeline, name)), expected)
