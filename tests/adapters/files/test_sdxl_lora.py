"""LoRA files of Stable Diffusion XL: kohya's original names, what other tools make of them, and other families."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_sdxl
import torch
import unet_lora_readers
from blocks import copy_model
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from original_layout import original_attention
from reference.file_shapes import problem
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from simpletune.adapters.files.attach import load_loras, require_shapes
from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.header import LoraHeader
from simpletune.adapters.files.mix import Recipe, mix
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import DoraUpdate, LoraUpdate
from simpletune.adapters.files.write import file_tensors, write_lora
from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.text.embedding_files import EmbeddingFile, read_embeddings, write_embeddings
from simpletune.adapters.text.encoding import encode_prompts
from simpletune.adapters.text.side import TextSide
from simpletune.adapters.text.text_option import Text, TextLora
from simpletune.adapters.text.update import TARGETS, TextUpdate
from simpletune.apps.cli.main import main
from simpletune.models.families import FAMILIES, family_of_config
from simpletune.models.lora_registry import families_of, names_of
from simpletune.models.sd15.sd15_lora import NAMES as SD15_NAMES
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_lora import LAYOUTS, NAMES
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.text_layers import text_key
from simpletune.system.options import UserError

KOHYA, ONETRAINER, DIFFUSERS, COMFY, PEFT, LYCORIS, BARE = LAYOUTS
TINY: dict[str, Any] = {  # two levels of two layers, numbered as the real ones, and the width of the real text
    "sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": (1, 2),
     "use_linear_projection": True, "cross_attention_dim": 2048,
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


@functools.cache
def untouched(layers_per_block: int = 2) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(**TINY, layers_per_block=layers_per_block).requires_grad_(False)


def tiny(layers_per_block: int = 2) -> UNet2DConditionModel:
    return copy_model(untouched(layers_per_block))


@functools.cache
def sd15() -> UNet2DConditionModel:
    """Only to be read."""
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
        found[name] = LoraUpdate(down, 0.1 * up, (1 + number % alphas) / 2, kernel=tuple(sides))
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
    found = {}
    for encoder in ("text_encoder", "text_encoder_2"):
        for layer in layers:
            outputs, rank = (16, 3) if "fc1" in layer else (8, 2)
            down, up = torch.randn(rank, 8, generator=generator), torch.randn(outputs, rank, generator=generator)
            found[f"{encoder}.{layer}"] = LoraUpdate(down, up)
    return found


def in_diffusers(file: Path, model: UNet2DConditionModel) -> StableDiffusionXLPipeline:
    """diffusers' pipeline with a file loaded."""
    first, second = encoders()
    pipeline = StableDiffusionXLPipeline(None, first, second, None, None, model, EulerDiscreteScheduler())  # type: ignore[arg-type]
    pipeline.load_lora_weights(str(file))
    return pipeline


@functools.cache
def real_layers() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that kohya's scripts train in SDXL, by layer."""
    shapes = SDXL().architecture.known_shapes()
    return {name: shapes[f"{name}.weight"] for name in Lora(targets="all_linear").modules(shapes)}


def test_kohyas_names_are_722_of_the_unet_and_72_and_192_of_the_encoders() -> None:
    layers = real_layers()
    blocks = {layer.partition(".attn1.to_q")[0] for layer in layers if layer.endswith(".attn1.to_q")}
    assert (len(layers), len(blocks)) == (722, 70) and len(layers) == 10 * 70 + 22
    names = {KOHYA.spelt(KOHYA.module(layer)): layer for layer in layers}
    assert names == {original_attention(layer).replace(".", "_"): layer for layer in layers} and len(names) == 722
    assert NAMES.original("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q") == (
        "input_blocks.4.1.transformer_blocks.0.attn1.to_q", None
    )  # fmt: skip
    assert NAMES.original("up_blocks.0.resnets.2.conv_shortcut")[0] == "output_blocks.2.0.skip_connection"
    assert NAMES.original("up_blocks.1.upsamplers.0.conv")[0] == "output_blocks.5.2.conv"
    with pytest.raises(KeyError):
        NAMES.original("down_blocks.0.attentions.0.proj_in")
    for part, count in (("text_encoder", 72), ("text_encoder_2", 192)):
        with torch.device("meta"):
            encoder = CLIPTextModel(CLIPTextConfig.from_dict(dict(SDXL().files.known_part(part).config())))
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
    assert (expected - predict(untouched())).abs().max() > 0.1
    close(predict(in_diffusers(file, tiny()).unet), expected)
    state = untouched().state_dict()
    names = {
        f"lora_unet_{original_attention(layer).replace('.', '_')}": f"{layer}.weight"
        for layer in updates_of(untouched(), "all_linear")
    }
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


@pytest.mark.parametrize(
    "layout",
    slow_but(
        ("kohya", "diffusers", "comfy", "peft"),
        [layout.name for layout in LAYOUTS if layout.name != "lycoris"],  # which holds LoKr and LoHa: see below
    ),
)
def test_what_diffusers_makes_of_a_layout_is_what_inspect_says(layout: str, tmp_path: Path) -> None:
    updates = {**updates_of(untouched(), "attention_qv", alphas=3), **text_updates()}
    file = write_lora(updates, tmp_path / "x.safetensors", layout)
    again = read_lora(file)
    assert set(again) == set(updates)
    for layer, update in updates.items():
        torch.testing.assert_close(again[layer].delta(), update.delta())
    tools = {tool["tool"]: tool for tool in describe(file)["tools"]}
    assert tools["simpletune"]["loads"] == "yes" and LoraHeader(file).layout_name == layout
    if tools["diffusers"]["loads"] == "refuses":
        with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
            in_diffusers(file, tiny())
        return
    pipeline = in_diffusers(file, tiny())
    loads = tools["diffusers"]["loads"] == "yes"
    of_unet = {layer: update for layer, update in updates.items() if not layer.startswith("text")}
    close(predict(pipeline.unet), predict(patched(tiny(), of_unet) if loads else untouched()))
    for name, plain in zip(("text_encoder", "text_encoder_2"), encoders(), strict=True):
        expected = encoded(patched(plain, updates, f"{name}.") if loads else plain)
        close(encoded(getattr(pipeline, name)), expected)


@pytest.mark.parametrize(
    ("method", "layout"),
    [pytest.param(Lora(rank=2), "kohya", marks=pytest.mark.slow), (Dora(rank=2), "kohya"), (Lokr(rank=2), "lycoris"),
     pytest.param(Loha(rank=2), "lycoris", marks=pytest.mark.slow), (Oft(block_size=4), "kohya")],
    ids=lambda each: getattr(each, "method", each),
)  # fmt: skip
def test_every_method_has_names_of_comfyui_and_is_read_and_written_again(
    method: Any, layout: str, tmp_path: Path
) -> None:
    model = tiny()
    method.model_copy(update={"targets": "attention_qv"}).attach(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith("magnitude"):
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    file, expected = method.export(model, tmp_path, {}), predict(model)
    state, layers = untouched().state_dict(), list(updates_of(untouched(), "attention_qv"))
    shapes = {
        f"lora_unet_{original_attention(name).replace('.', '_')}": state[f"{name}.weight"].shape for name in layers
    }
    parts: dict[str, dict[str, Any]] = {}
    for key, tensor in load_file(file).items():
        module, _, role = key.partition(".")
        parts.setdefault(module, {})[role] = tuple(tensor.shape)
    assert len(parts) == len(layers) and not [m for m, shape in shapes.items() if problem(tuple(shape), parts[m])]
    for source in (file, write_lora(read_lora(file), tmp_path / "again.safetensors", layout)):
        assert set(load_file(source)) == set(load_file(file))
        again = tiny()
        load_loras(again, [(source, 1.0)])
        close(predict(again), expected)
    assert describe(file)["family"] == "Stable Diffusion XL"


def test_a_unet_whose_blocks_have_other_numbers_gets_diffusers_names(tmp_path: Path) -> None:
    """With one layer in a level, the original names of the published models would be those of other layers."""
    for targets, layers in (("attention_qv", 1), ("attention_qv", 2)):
        model, theirs = tiny(layers_per_block=layers), tiny(layers_per_block=layers)
        lora = Lora(rank=2, targets=targets)
        lora.attach(model, 0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.1)
        file = lora.export(model, tmp_path, {})
        assert any(key.startswith("lora_unet_mid_block") for key in load_file(file)) == (layers == 1)
        close(predict(in_diffusers(file, theirs).unet), predict(model))


MIDDLE = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


def mid_only(width: int = 16) -> dict[str, LoraUpdate]:
    return {MIDDLE: LoraUpdate(torch.ones(1, width), torch.ones(width, 1))}


def test_shapes_and_names_decide_a_family_and_ambiguity_is_said(tmp_path: Path) -> None:
    text = MIDDLE.replace("attn1.to_q", "attn2.to_k")
    known: dict[str, tuple[dict[str, tuple[int, ...]], tuple[Any, ...]]] = {
        "wide text": ({text: (1280, 2048)}, (NAMES,)),
        "narrow text": ({text: (1280, 768)}, (SD15_NAMES,)),
        "deep": ({MIDDLE.replace("blocks.0.attn", "blocks.9.attn"): (1280, 1280)}, (NAMES,)),
        "up 0": ({"up_blocks.0.attentions.2.proj_in": (1280, 1280)}, (NAMES,)),
        "up 3": ({"up_blocks.3.attentions.0.proj_in": (320, 320)}, (SD15_NAMES,)),
        "neither": ({MIDDLE: (1280, 1280)}, (SD15_NAMES, NAMES)),
        "with another layer": ({MIDDLE: (1280, 1280), "up_blocks.0.attentions.0.proj_in": (1280, 1280)}, (NAMES,)),
    }
    for case, (layers, expected) in known.items():
        assert list(families_of(layers)) == [expected], case
        assert names_of(layers) is expected[0]
    file = write_lora(mid_only(), tmp_path / "x.safetensors", "kohya")
    assert describe(file)["family"] == "a U-Net (Stable Diffusion 1.5 or 2 or Stable Diffusion XL)"
    assert list(load_file(file))[0].startswith("lora_unet_mid_block_attentions_0_")  # which tools for both read
    known_by = {
        "ss_base_model_version": "sdxl_base_v1-0",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
    }
    for field, value in known_by.items():
        save_file(load_file(file), file, {field: value})
        header = LoraHeader(file)
        assert header.family[:2] == ("Stable Diffusion XL", f"{field} in its header: {value}")
        assert header.layout is ONETRAINER
    write_lora(mid_only(), file, "kohya", names=NAMES)
    assert LoraHeader(file).layout is KOHYA and LoraHeader(file).family.model == "Stable Diffusion XL"


def test_a_model_is_of_the_family_that_supports_its_configuration() -> None:
    assert [family.family for family in FAMILIES if family.lora[0].names in (NAMES, SD15_NAMES)] == ["sd15", "sdxl"]
    for model, family in ((untouched(), "sdxl"), (sd15(), "sd15")):
        assert family_of_config({**model.config, "_class_name": type(model).__name__}).family == family


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_a_lora_of_another_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xl, older = updates_of(untouched(), "attention_qv"), updates_of(sd15(), "attention_qv")
    of_xl = write_lora(xl, tmp_path / "xl.safetensors", "kohya")
    of_sd15 = write_lora(older, tmp_path / "sd15.safetensors", "kohya")
    xl_title, older_title = "Stable Diffusion XL", "Stable Diffusion 1.5 or 2"
    said = f"is for {older_title}, and the base is {xl_title}. Give a LoRA for {xl_title}"
    other = f"is for {xl_title}, and the base is {older_title}. Give a LoRA for {older_title}"
    with pytest.raises(UserError, match=rf"sd15.safetensors {said}$"):
        load_loras(tiny(), [(of_sd15, 1.0)])
    with pytest.raises(UserError, match=rf"xl.safetensors {other}$"):
        load_loras(sd15(), [(of_xl, 1.0)])
    with pytest.raises(UserError, match=f"model.loras: a {said}$"):
        require_shapes("model.loras: a", older, {name: shape for name, shape in real_layers().items()})
    for model, file, words in ((untouched(), of_sd15, said), (sd15(), of_xl, other)):
        model.save_pretrained(tmp_path / "base" / "unet")
        assert run("merge", file, "--base", tmp_path / "base", "--out", tmp_path / "merged") == 2
        assert words in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match="are for several: .* of Stable Diffusion XL, .* of Stable Diffusion 1.5 or 2"):
        mix([(xl, 1.0), (older, 1.0)], Recipe())
    mid = write_lora(mid_only(), tmp_path / "mid.safetensors", "kohya")
    for sections, words in (
        ({"model.loras": [f"{of_sd15}:0.5"]}, f"error: model.loras: {of_sd15} {said}"),
        ({"adapter.start": str(of_sd15)}, f"error: adapter.start: {of_sd15} {said}"),
        ({"model.loras": [str(of_xl), str(mid)]}, ""),
        ({"model.loras": ["owner/on-the-hub"]}, ""),
    ):
        changes = [
            f"{path}={json.dumps(value) if isinstance(value, list) else value}" for path, value in sections.items()
        ]
        assert run("check", "demo_sdxl", *changes) == (2 if words else 0)
        assert words in " ".join(capsys.readouterr().err.split())
    load_loras(tiny(), [(mid, 1.0)])  # may be of either


def test_the_commands_write_sdxls_names_and_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    updates = {**updates_of(untouched(), "attention_qv"), **text_updates()}
    file = write_lora(updates, tmp_path / "x.safetensors", "diffusers")
    expected = {
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora", "ss_base_model_version": "sdxl_base_v1-0",
        "ss_network_module": "networks.lora",
    }  # fmt: skip
    out = tmp_path / "out.safetensors"
    starts = {
        "kohya": "lora_unet_input_blocks_4_1_",
        "comfy": "diffusion_model.input_blocks.4.1.",
        "diffusers": "unet.",
    }
    for layout, start in starts.items():
        assert run("export", file, "--format", layout, "--out", out, "--overwrite") == 0
        with safe_open(out, framework="pt") as handle:
            found, keys = handle.metadata(), list(handle.keys())
        assert {name: found.get(name) for name in expected} == expected
        assert any(key.startswith(start) for key in keys)
        text = {"kohya": "lora_te2_text", "comfy": "text_encoders.clip_g.", "diffusers": "text_encoder_2."}[layout]
        assert sum(key.startswith(text) for key in keys) == (10 if layout == "diffusers" else 15)
    assert run("resize", file, "--rank", 1, "--out", out, "--overwrite") == 0
    assert run("mix", f"{file}:0.5", out, "--out", tmp_path / "mixed.safetensors", "--format", "kohya") == 0
    keys = load_file(tmp_path / "mixed.safetensors")
    assert sum(key.startswith("lora_unet_input_blocks_4_1_") for key in keys) == 3 * 4
    capsys.readouterr()
    assert run("inspect", file, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["family"] == "Stable Diffusion XL" and "width 2048" in about["family_shown_by"]


def kohya_file(file: Path, text: str, width: int = 640, **header: str) -> Path:
    """A file of one attention, which SD 1.5 has too, and of text encoders."""
    modules = ["lora_unet_output_blocks_3_1_transformer_blocks_0_attn1_to_q"]
    modules += [f"lora_{each}_text_model_encoder_layers_0_self_attn_q_proj" for each in text.split()]
    tensors = {}
    for module in modules:
        tensors[f"{module}.lora_down.weight"], tensors[f"{module}.lora_up.weight"] = (
            torch.ones(1, width),
            torch.ones(width, 1),
        )
    save_file(tensors, file, header)
    return file


def test_mix_keeps_both_text_encoders_and_the_model_where_layers_do_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = {"ss_base_model_version": "sdxl_base_v1-0"}
    first = kohya_file(tmp_path / "a.safetensors", "te1 te2", **header)
    second = kohya_file(tmp_path / "b.safetensors", "te1 te2", **header)
    out = tmp_path / "mixed.safetensors"
    assert run("mix", first, second, "--out", out, "--format", "kohya") == 0
    assert "3 layers" in capsys.readouterr().out
    tensors = load_file(out)
    assert {key.partition(".")[0] for key in tensors} == {key.partition(".")[0] for key in load_file(first)}
    assert len(tensors) == 3 * 3
    with safe_open(out, framework="pt") as handle:
        assert handle.metadata()["ss_base_model_version"] == "sdxl_base_v1-0"
    shared = write_lora(mid_only(640), tmp_path / "shared.safetensors", "diffusers")  # of either model
    assert run("mix", shared, first, "--out", tmp_path / "with_shared.safetensors") == 0
    older = write_lora(mid_only(), tmp_path / "older.safetensors", "kohya", metadata={"ss_base_model_version": "sd_v1"})
    assert LoraHeader(older).family.model == "Stable Diffusion 1.5"
    capsys.readouterr()
    assert run("mix", first, older, "--out", tmp_path / "no.safetensors") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "a.safetensors for Stable Diffusion XL, older.safetensors for Stable Diffusion 1.5 or 2. Use LoRAs" in said
    updates = {**mid_only(), "text_encoder_2.text_model.encoder.layers.0.mlp.fc1": mid_only()[MIDDLE]}
    with pytest.raises(UserError, match="fc1 is a layer of CLIP-G, and the denoiser's layers are of a model with one"):
        write_lora(updates, tmp_path / "no.safetensors", "kohya", names=SD15_NAMES)


def test_dora_of_a_convolution_keeps_its_dimensions_in_every_layout(tmp_path: Path) -> None:
    """ComfyUI divides a weight [o, i, 1, 1] by it."""
    layer = "up_blocks.0.resnets.2.conv_shortcut"
    lora = LoraUpdate(torch.ones(1, 24), torch.ones(16, 1), kernel=(1, 1))
    updates = {layer: DoraUpdate(lora, torch.ones(16), torch.ones(16))}
    for layout, shape in (("kohya", [16, 1, 1, 1]), ("onetrainer", [16, 1, 1, 1]), ("diffusers", [16, 1, 1, 1])):
        tensors = load_file(write_lora(updates, tmp_path / "x.safetensors", layout, names=NAMES))
        (scale,) = (tensor for key, tensor in tensors.items() if key.endswith("dora_scale"))
        assert list(scale.shape) == shape, layout
        assert set(read_lora(tmp_path / "x.safetensors")) == {layer}


def test_a_file_of_diffusers_names_keeps_them_where_original_ones_may_be_other_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one layer in a level, kohya's names are those of other modules."""
    model, theirs = tiny(layers_per_block=1), tiny(layers_per_block=1)
    file = write_lora(updates_of(model, "attention_qv"), tmp_path / "x.safetensors", "onetrainer", names=NAMES)
    out = tmp_path / "out.safetensors"
    assert run("resize", file, "--rank", 2, "--out", out) == 0
    assert LoraHeader(out).layout is ONETRAINER
    assert run("mix", file, out, "--out", tmp_path / "mixed.safetensors") == 0
    assert LoraHeader(tmp_path / "mixed.safetensors").layout is ONETRAINER
    kohya = write_lora(updates_of(untouched(), "attention_qv"), tmp_path / "kohya.safetensors", "kohya")
    assert run("resize", kohya, "--rank", 2, "--out", out, "--overwrite") == 0
    assert LoraHeader(out).layout is KOHYA
    patched(theirs, updates_of(model, "attention_qv"))
    for name, each in (("base", model), ("tuned", theirs)):
        each.save_pretrained(tmp_path / name / "unet")
    extract = ("extract", tmp_path / "base", tmp_path / "tuned", "--rank", 2, "--out", tmp_path / "diff.safetensors")
    assert run(*extract) == 0
    assert LoraHeader(tmp_path / "diff.safetensors").layout is ONETRAINER
    capsys.readouterr()
    assert run(*extract, "--overwrite", "--format", "kohya") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--format kohya: its names have the published models' numbers of blocks" in said
    assert said.endswith("Use --format onetrainer or diffusers")


def test_patterns_choose_blocks_and_b_lora_is_a_list_of_them() -> None:
    shapes = SDXL().architecture.known_shapes()
    none, content, style = ({"pattern": name, "rank": rank} for name, rank in
                            (("*", 0), ("up.0.attentions.0", 64), ("up.0.attentions.1", 64)))  # fmt: skip
    lora = Lora(targets="attention", layers=[none, content, style])
    found = lora.modules(shapes)
    assert {layer.partition(".transformer")[0] for layer in found} == {f"up_blocks.0.attentions.{n}" for n in (0, 1)}
    assert len(found) == 2 * 10 * 8
    assert lora.describe(shapes).startswith("LoRA of rank 64, scale 1, on 160 linear layers (")
    assert list(lora.problems(shapes)) == []
    mid = Lora(layers=[none, {"pattern": "mid", "rank": 4}]).modules(shapes)
    assert len(mid) == 80 and all(layer.startswith("mid_block.") for layer in mid)
    (problem_,) = Lora(layers=[{"pattern": "up.2.attentions", "rank": 4}]).problems(shapes)
    assert "'up.2.attentions' matches no layer" in problem_.message


def test_a_run_of_sd15_keeps_its_names() -> None:
    shapes = SD15().architecture.known_shapes()
    layers = {name: shapes[f"{name}.weight"] for name in Lora(targets="all_linear").modules(shapes)}
    assert len(layers) == 192 and names_of(layers) is SD15_NAMES
    with pytest.raises(UserError, match="LoRAs for Stable Diffusion 1.5 or 2 do not have the original names"):
        SD15_NAMES.original(MIDDLE)
    with pytest.raises(UserError, match="is not a layer of Stable Diffusion XL"):
        file_tensors({"down_blocks.0.attentions.0.proj_in": LoraUpdate(torch.ones(1, 8), torch.ones(8, 1))}, COMFY)


def test_a_run_leaves_the_updates_of_both_text_encoders(tmp_path: Path) -> None:
    first, second = encoders()
    text = TextUpdate(Text(lora=TextLora(rank=2, alpha=1.0)), SDXL(), {}, {"clip_l": first, "clip_g": second})
    text.attach_lora(0)
    file = write_lora(updates_of(untouched(), ["attn2.to_k"]), tmp_path / "x.safetensors", "kohya")
    text.export_lora(file, {})
    keys = [key for key in load_file(file) if key.startswith("lora_te")]
    assert len(keys) == 2 * 2 * 4 * 3 and {key.partition("_text_model_")[0] for key in keys} == {"lora_te1", "lora_te2"}
    layers = [layer for layer in read_lora(file) if layer.startswith("text_encoder")]
    assert len(layers) == 2 * 2 * 4 and describe(file)["text_encoders"] == {"CLIP-L": 8, "CLIP-G": 8}


@torch.no_grad()
def test_diffusers_reads_the_embeddings_of_both_encoders_as_inspect_says(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = {"clip_l": torch.randn(2, 32, generator=generator), "clip_g": torch.randn(2, 48, generator=generator)}
    file = write_embeddings(tmp_path / "a.safetensors", EmbeddingFile("<dots>", "input", vectors, "sdxl", ("a", "b")))
    (about,) = describe(file)["embeddings"]
    (said,) = next(tool["notes"] for tool in about["tools"] if tool["tool"] == "diffusers")
    for key, part in (("clip_l", ""), ("clip_g", "_2")):
        parts = f"text_encoder=pipeline.text_encoder{part}, tokenizer=pipeline.tokenizer{part})"
        assert f"load_textual_inversion(tensors['{key}'], token, {parts}" in said
    save_file({"clip_g": torch.ones(2, 1280)}, tmp_path / "alone.safetensors")  # by another tool, without a family
    (alone,) = describe(tmp_path / "alone.safetensors")["embeddings"]
    (support,) = (tool for tool in alone["tools"] if tool["tool"] == "diffusers")
    assert support["loads"] == "refuses"
    assert support["notes"] == ["a pipeline needs vectors for each of its encoders, and the file has only clip_g"]
    with safe_open(file, framework="pt") as handle:
        assert "diffusers, for CLIP-L: pipeline.load_textual_inversion" in handle.metadata()["modelspec.usage_hint"]
    base = tiny_sdxl.build(tmp_path / "base")
    pipeline = StableDiffusionXLPipeline.from_pretrained(base, local_files_only=True)
    for key, part in (("clip_l", ""), ("clip_g", "_2")):
        own = {f"{kind}": getattr(pipeline, f"{kind}{part}") for kind in ("text_encoder", "tokenizer")}
        pipeline.load_textual_inversion(load_file(file)[key], "<dots>", **own)
    theirs = pipeline.encode_prompt("a <dots> picture", device="cpu", do_classifier_free_guidance=False)
    option, side = SDXL(pretrained=str(base)), TextSide(read_embeddings(file), ())
    ours = encode_prompts(option, ["a <dots> picture"], torch.device("cpu"), torch.float32, side)["a <dots> picture"]
    torch.testing.assert_close((ours.embeds, ours.pooled), (theirs[0][0], theirs[2][0]), rtol=0, atol=1e-5)
