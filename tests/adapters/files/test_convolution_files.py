"""Updates of convolutions in files: names, layouts, Tucker forms, and what diffusers and ComfyUI make of them."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import lycoris
import pytest
import torch
import unet_lora_readers
from blocks import copy_model
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_lora_to_diffusers,
    _maybe_map_sgm_blocks_to_diffusers,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpletune.adapters.files.attach import fold_lora, load_loras
from simpletune.adapters.files.base_reader import BaseReader
from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.factors import resize_all
from simpletune.adapters.files.merge import Merger
from simpletune.adapters.files.mix import Recipe, mix
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.starting_point import start_from
from simpletune.adapters.files.updates import LohaUpdate, LokrUpdate, LoraUpdate, Update
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.apps.cli.main import main
from simpletune.engine.quant.precision import Int8
from simpletune.models.families import FAMILIES
from simpletune.models.lora_registry import is_convolution
from simpletune.models.unet.unet_files import origins
from simpletune.system.options import UserError

OF_BOTH: dict[str, Any] = {"sample_size": 8, "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 1}
TINY: dict[str, dict[str, Any]] = {
    "sd15": OF_BOTH | {
        "block_out_channels": (8, 16), "cross_attention_dim": 768,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
    "sdxl": OF_BOTH | {  # two layers a level, numbered as the real ones
        "layers_per_block": 2, "block_out_channels": (8, 16), "use_linear_projection": True,
        "cross_attention_dim": 2048, "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 32, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    },
}  # fmt: skip
CONDITIONS = {"text_embeds": torch.ones(2, 8), "time_ids": torch.arange(12.0).view(2, 6)}
CONV1 = "lora_unet_down_blocks_0_resnets_0_conv1"  # [8, 8, 3, 3] of the tiny SD 1.5


@functools.cache
def untouched(family: str) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(**TINY[family]).requires_grad_(False)


def tiny(family: str) -> UNet2DConditionModel:
    return copy_model(untouched(family))


@torch.no_grad()
def predict(model: nn.Module) -> Tensor:
    draw, width = torch.Generator().manual_seed(5), model.config["cross_attention_dim"]
    z_t, prompt = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 5, width, generator=draw)
    prediction: Tensor = model(z_t, torch.tensor([3, 700]), prompt, added_cond_kwargs=CONDITIONS).sample
    return prediction


def close(actual: Tensor, expected: Tensor) -> None:
    """fp32, 1e-5 of the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def in_diffusers(file: Path, model: UNet2DConditionModel) -> Tensor:
    """What diffusers' pipeline makes of a file."""
    names = ["vae", "text_encoder", "tokenizer", "feature_extractor"]
    kind: Any = StableDiffusionPipeline
    extra: dict[str, Any] = {"safety_checker": None, "requires_safety_checker": False}
    if model.config.addition_embed_type:
        kind, extra = StableDiffusionXLPipeline, {"text_encoder_2": None, "tokenizer_2": None}
        names.remove("feature_extractor")
    pipeline = kind(**dict.fromkeys(names), unet=model, scheduler=DDIMScheduler(), **extra)
    pipeline.load_lora_weights(file)
    return predict(model)


def trained(method: Any, family: str) -> UNet2DConditionModel:
    """A tiny U-Net with updates that show."""
    model, draw = tiny(family), torch.Generator().manual_seed(2)
    method.attach(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
        elif parameter.requires_grad:
            parameter.data.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=draw))
    return model


def original_state(model: UNet2DConditionModel) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A U-Net's tensors, and their names in kohya's files for SDXL by the names of the original tensors."""
    weights = {name: origin.name for name, origin in origins(dict(model.config)).items() if name.endswith(".weight")}
    names = {f"lora_unet_{n.removesuffix('.weight').replace('.', '_')}": name for name, n in weights.items()}
    return model.state_dict(), names


def comfyui(model: UNet2DConditionModel, tensors: dict[str, Tensor]) -> UNet2DConditionModel:
    """The model with a file patched in as ComfyUI does; every module of the file has a weight."""
    state, names = original_state(model)
    names |= unet_lora_readers.comfy_names(state)
    for module, parts in lycoris.modules({key: tensor.float() for key, tensor in tensors.items()}).items():
        weight = state[names[module]]
        weight += lycoris.convolution_difference(parts, tuple(weight.shape)).to(weight.dtype)
    return model


FAST = ("lora", "sdxl"), ("lokr", "sd15")
METHODS: dict[str, Any] = {
    "lora": Lora(rank=2, alpha=1.0, conv_rank=3, conv_alpha=6.0, targets="attention_qv"),
    "loha": Loha(rank=2, conv_rank=2),
    "lokr": Lokr(factor=4, rank=1, conv_rank=1),
    "lokr, whole": Lokr(factor=2, rank=None, conv_rank=1024),
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=[] if (name, family) in FAST else pytest.mark.slow)
        for name in METHODS
        for family in TINY
    ],
)
def test_a_run_s_file_does_what_was_trained_here_in_comfyui_and_in_diffusers(
    name: str, family: str, tmp_path: Path
) -> None:
    method = METHODS[name]
    model = trained(method, family)
    file = method.export(model, tmp_path, {"format": "pt"})
    expected = predict(model)
    assert (expected - predict(untouched(family))).abs().max() > 0.01
    tensors = load_file(file)
    close(predict(comfyui(tiny(family), tensors)), expected)
    again = tiny(family)
    load_loras(again, [(file, 1.0)])
    close(predict(again), expected)
    fold_lora(again)
    close(predict(again), expected)
    for layout in ("kohya", "diffusers"):
        updates = read_lora(file)
        assert {u.kernel for layer, u in updates.items() if is_convolution(layer)} == {(3, 3)}
        plain = updates if name == "lora" else resize_all(updates, None, 1.0)[0]
        written = write_lora(plain, tmp_path / f"{layout}.safetensors", layout)
        if name == "lora" and layout == "kohya":
            torch.testing.assert_close(load_file(written), tensors, rtol=0, atol=0)
        if name == "lora" or layout == "diffusers":
            close(in_diffusers(written, tiny(family)), expected)
        else:
            close(predict(comfyui(tiny(family), load_file(written))), expected)
    if name == "lokr, whole":  # LyCORIS loads nothing else into its convolutions
        ends = ("shortcut.lokr_w2", "skip_connection.lokr_w2")
        assert {tensor.dim() for key, tensor in tensors.items() if key.endswith(ends)} == {4}
    if name != "lora":
        again = load_file(write_lora(read_lora(file), tmp_path / "again.safetensors", "lycoris"))
        assert {key: tensor.shape for key, tensor in again.items()} == {k: t.shape for k, t in tensors.items()}
        assert all(torch.equal(again[key], tensors[key]) for key in tensors if ".alpha" not in key)


def test_dora_of_convolutions_does_what_was_trained(tmp_path: Path) -> None:
    method = Dora(rank=2, conv_rank=3, conv_alpha=1.5)
    model = trained(method, "sd15")
    file, expected = method.export(model, tmp_path, {"format": "pt"}), predict(model)
    tensors = load_file(file)
    assert tensors[f"{CONV1}.dora_scale"].shape == (8, 1, 1, 1)
    again = tiny("sd15")
    load_loras(again, [(file, 1.0)])
    close(predict(again), expected)
    fold_lora(again)
    close(predict(again), expected)
    close(in_diffusers(write_lora(read_lora(file), tmp_path / "d.safetensors", "diffusers"), tiny("sd15")), expected)


UNETS = [number for number, family in enumerate(FAMILIES) if family.denoiser == "unet"]


@pytest.mark.parametrize("number", UNETS, ids=[FAMILIES[number].family for number in UNETS])
def test_names_are_those_that_diffusers_and_kohya_give_these_layers(number: int) -> None:
    """kohya's file of a whole published U-Net, through diffusers' converters."""
    family = FAMILIES[number]
    layouts = {layout.name: layout for layout in family.lora}
    kohya, bare, shapes = layouts["kohya"], layouts["bare"], family.architecture.known_shapes()
    convolutions = [name.removesuffix(".weight") for name, shape in shapes.items() if shape[2:] == (3, 3)]
    assert len(convolutions) == {"sd15": 52, "sdxl": 40}[family.family]
    for layer in convolutions:
        assert is_convolution(layer) and bare.layers(layer) == kohya.layers(kohya.key(kohya.module(layer), "x")[:-2])
        assert kohya.names.kernel(layer, "") == (3, 3)
    inside = [layer for layer in convolutions if layer not in ("conv_in", "conv_out")]  # kohya trains these alone
    state = {
        kohya.key(kohya.module(layer), role): torch.zeros(1, 1, 1, 1) for layer in inside for role in ("up", "down")
    }
    if kohya.original:
        state = _maybe_map_sgm_blocks_to_diffusers(state, untouched("sdxl").config)
    found, _ = _convert_non_diffusers_lora_to_diffusers(state)
    assert sorted(found) == sorted(f"unet.{layer}.lora.{role}.weight" for layer in inside for role in ("up", "down"))
    if kohya.original:
        listed = {"down_blocks.0.resnets.0.conv1": "input_blocks_1_0_in_layers_2", "mid_block.resnets.1.conv2":
                  "middle_block_2_out_layers_3", "down_blocks.0.downsamplers.0.conv": "input_blocks_3_0_op",
                  "up_blocks.0.upsamplers.0.conv": "output_blocks_2_2_conv", "conv_in": "input_blocks_0_0"}  # fmt: skip
        assert all(kohya.spelt(kohya.module(layer)) == name for layer, name in listed.items())


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draw) / 3 for name, shape in shapes.items()}


TUCKER: dict[str, dict[str, tuple[int, ...]]] = {
    "lora": {"lora_down.weight": (2, 8, 1, 1), "lora_mid.weight": (2, 2, 3, 3), "lora_up.weight": (8, 2, 1, 1)},
    "loha": {f"hada_{name}": shape for n in "12" for name, shape in
             ((f"t{n}", (2, 2, 3, 3)), (f"w{n}_a", (2, 8)), (f"w{n}_b", (2, 8)))},
    "lokr": {"lokr_w1": (4, 2), "lokr_t2": (2, 2, 3, 3), "lokr_w2_a": (2, 2), "lokr_w2_b": (2, 4)},
    "lokr, both": {"lokr_w1_a": (4, 1), "lokr_w1_b": (1, 2), "lokr_t2": (1, 1, 3, 3), "lokr_w2_a": (1, 2),
                   "lokr_w2_b": (1, 4)},
}  # fmt: skip


@pytest.mark.parametrize("case", TUCKER)
def test_tucker_forms_are_read_as_comfyui_does_and_written_without_a_core(case: str, tmp_path: Path) -> None:
    tensors = {f"{CONV1}.{role}": tensor for role, tensor in drawn(TUCKER[case]).items()}
    tensors[f"{CONV1}.alpha"] = torch.tensor(3.0)
    save_file(tensors, tmp_path / "x.safetensors")
    (update,) = read_lora(tmp_path / "x.safetensors").values()
    expected = lycoris.convolution_difference(lycoris.modules(tensors)[CONV1], (8, 8, 3, 3)).float()
    close(update.delta().view(8, 8, 3, 3), expected)
    close(update.as_lora().delta().view(8, 8, 3, 3), expected)
    layer = "down_blocks.0.resnets.0.conv1"
    file = write_lora({layer: update}, tmp_path / "y.safetensors", "kohya" if case == "lora" else "lycoris")
    written = load_file(file)
    assert not any("mid" in key or "_t" in key for key in written)
    close(lycoris.convolution_difference(lycoris.modules(written)[CONV1], (8, 8, 3, 3)).float(), expected)
    model = tiny("sd15")
    load_loras(model, [(tmp_path / "x.safetensors", 0.5)])
    base = tiny("sd15")
    base.get_submodule(layer).weight += 0.5 * expected  # type: ignore[operator]
    close(predict(model), predict(base))


def test_cores_that_do_not_match_are_refused(tmp_path: Path) -> None:
    for case, role, shape in (("lora", "lora_mid.weight", (2, 3, 3, 3)), ("loha", "hada_t1", (3, 2, 3, 3)),
                              ("lokr", "lokr_w2_b", (3, 4))):  # fmt: skip
        shapes = TUCKER[case] | {role: shape}
        save_file({f"{CONV1}.{r}": tensor for r, tensor in drawn(shapes).items()}, tmp_path / "x.safetensors")
        with pytest.raises(UserError, match=r"resnets_0_conv1 has factors .*, which do not match"):
            read_lora(tmp_path / "x.safetensors")
    lone = {f"{CONV1}.{role}": tensor for role, tensor in drawn(TUCKER["lokr"]).items() if role != "lokr_w2_a"}
    save_file(lone, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="conv1 lacks one of its factors"):
        read_lora(tmp_path / "x.safetensors")


def test_a_convolution_of_another_width_is_refused(tmp_path: Path) -> None:
    wide = {"down_blocks.0.resnets.0.conv1": LoraUpdate(torch.ones(2, 9 * 320), torch.ones(320, 2), kernel=(3, 3))}
    file = write_lora(wide, tmp_path / "x.safetensors", "kohya")
    with pytest.raises(UserError, match="conv1 has 2880 inputs and 320 outputs; this model has 72 and 8. It belongs"):
        load_loras(tiny("sd15"), [(file, 1.0)])


def random_updates(family: str, rank: int, conv_rank: int) -> dict[str, Update]:
    draw, found = torch.Generator().manual_seed(rank), {}
    shapes = shapes_of(untouched(family))
    for layer in Lora(targets="all_linear", conv_rank=1).modules(shapes):
        o, *inputs = shapes[f"{layer}.weight"]
        r = conv_rank if is_convolution(layer) else rank
        down, up = torch.randn(r, math.prod(inputs), generator=draw), torch.randn(o, r, generator=draw)
        found[layer] = LoraUpdate(down, 0.05 * up, 0.5, tuple(inputs[1:]))
    return found


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def patched(updates: dict[str, Update], strength: float) -> UNet2DConditionModel:
    """W + strength times each update, by the definition."""
    model = tiny("sd15")
    for layer, update in updates.items():
        weight = model.get_submodule(layer).weight
        assert isinstance(update, LoraUpdate) and isinstance(weight, Tensor)
        down = update.down.view(update.rank, *weight.shape[1:])
        weight += strength * update.scale * torch.einsum("or,r...->o...", update.up, down)
    return model


def test_merge_extract_resize_and_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out, lora, found = (tmp_path / name for name in ("base", "out", "a.safetensors", "b.safetensors"))
    untouched("sd15").save_pretrained(base)
    updates = random_updates("sd15", 2, 3)
    write_lora(updates, lora, "kohya")
    assert main(["merge", f"{lora}:0.5", "--base", str(base), "--out", str(out)]) == 0
    expected = predict(patched(updates, 0.5))
    close(predict(UNet2DConditionModel.from_pretrained(out)), expected)

    words = ["extract", str(base), str(out), "--format", "kohya", "--out", str(found), "--overwrite"]
    assert main([*words, "--rank", "2"]) == 0
    said = capsys.readouterr().out
    assert "left out 18 tensors" in said and "give --conv-rank, such as --conv-rank 8, for the convolutions" in said
    assert not any(map(is_convolution, read_lora(found)))
    assert main([*words, "--rank", "2", "--conv-rank", "3"]) == 0
    assert "left out" not in capsys.readouterr().out
    again = read_lora(found)
    assert {(is_convolution(layer), u.rank) for layer, u in again.items()} == {(False, 2), (True, 3)}
    close(in_diffusers(found, tiny("sd15")), expected)

    small = tmp_path / "small.safetensors"
    assert main(["resize", str(lora), "--rank", "1", "--conv-rank", "2", "--out", str(small)]) == 0
    for layer, update in read_lora(small).items():
        s = torch.linalg.svdvals(updates[layer].delta().double())
        kept = 2 if is_convolution(layer) else 1
        error = (update.delta() - updates[layer].delta()).double().square().sum()
        assert update.rank == kept and float(error) == pytest.approx(float(s[kept:].square().sum()), rel=1e-3, abs=1e-9)

    other = random_updates("sd15", 1, 2)
    for recipe in (Recipe("cat"), Recipe("svd", rank=16)):
        mixed = mix([(updates, 0.7), (other, -0.4)], recipe)
        file = write_lora(mixed, tmp_path / "mixed.safetensors", "kohya")
        both = {layer: 0.7 * updates[layer].delta() - 0.4 * other[layer].delta() for layer in updates}
        assert max((u.delta() - both[n]).abs().max() for n, u in read_lora(file).items()) < 1e-4


def test_updates_go_into_quantised_bases_and_their_own_types(tmp_path: Path) -> None:
    """The base of ``model.loras``: merged first, in the base's type, then quantised."""
    tiny("sd15").bfloat16().save_pretrained(tmp_path / "base")
    updates = random_updates("sd15", 2, 2)
    merger = Merger(BaseReader(str(tmp_path / "base")), [(updates, 1.0)], None)
    layer = "down_blocks.0.downsamplers.0.conv"
    weight = tiny("sd15").bfloat16().get_submodule(layer).weight
    assert isinstance(weight, Tensor)
    expected = (weight.float() + updates[layer].delta().view_as(weight)).bfloat16()
    assert torch.equal(merger.get(f"{layer}.weight"), expected)
    model = tiny("sd15").bfloat16()
    model.get_submodule(layer).weight.copy_(expected)  # type: ignore[operator]
    quantised = Int8().convert(model.get_submodule(layer))
    assert (quantised.dequantise() - expected.float()).norm() < 0.01 * expected.float().norm()  # type: ignore[operator]
    model = tiny("sd15")
    for name in updates:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Int8(compute="fp32").convert(model.get_submodule(name)))
    before = predict(model)
    file = write_lora(updates, tmp_path / "a.safetensors", "kohya")
    load_loras(model, [(file, 1.0)])  # over the frozen layers
    moved = predict(model) - before
    assert (moved - (predict(patched(updates, 1.0)) - predict(untouched("sd15")))).norm() < 0.1 * moved.norm()


@pytest.mark.parametrize("name", ["lora", "loha", "lokr"])
def test_training_starts_from_a_file_with_convolutions(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    model = trained(method, "sd15")
    updates = read_lora(method.export(model, tmp_path, {}))
    fresh = tiny("sd15")
    method.attach(fresh, 1)
    assert start_from(fresh, updates, 1.0) == 0
    close(predict(fresh), predict(model))


def test_inspect_counts_convolutions_and_says_who_reads_them(tmp_path: Path) -> None:
    about = describe(write_lora(random_updates("sd15", 2, 3), tmp_path / "x.safetensors", "kohya"))
    assert about["targets"]["conv1"] == about["targets"]["conv2"] == 8
    assert about["targets"]["conv"] == 2 and about["targets"]["time_emb_proj"] == 8
    assert about["ranks"] == {"2": about["modules"] - 18, "3": 18}
    assert {tool["tool"]: tool["loads"] for tool in about["tools"]} == dict.fromkeys(
        ("diffusers", "ComfyUI", "Forge", "simpletune"), "yes"
    )


def test_two_dimensional_factors_get_the_kernel_of_their_layer(tmp_path: Path) -> None:
    loha = drawn({f"hada_w{n}_{part}": (8, 2) if part == "a" else (2, 72) for n in "12" for part in "ab"})
    lokr = drawn({"lokr_w1": (2, 2), "lokr_w2_a": (4, 1), "lokr_w2_b": (1, 36)})
    for factors, kind in ((loha, LohaUpdate), (lokr, LokrUpdate)):
        save_file({f"{CONV1}.{name}": f for name, f in factors.items()}, tmp_path / "x.safetensors")
        (update,) = read_lora(tmp_path / "x.safetensors").values()
        assert isinstance(update, kind) and update.kernel == (3, 3) and update.shape == (8, 72)
        assert update.as_lora().file_factors()[0]["down"].shape[1:] == (8, 3, 3)


def test_a_base_refuses_an_update_of_another_shape(tmp_path: Path) -> None:
    model, layer = tiny("sd15"), "down_blocks.0.downsamplers.0.conv"
    model.save_pretrained(tmp_path / "base")
    outputs, inputs, *kernel = model.get_submodule(layer).weight.shape  # type: ignore[union-attr, misc]
    wider = LoraUpdate(torch.ones(2, 2 * inputs * math.prod(kernel)), torch.ones(outputs, 2))
    with pytest.raises(UserError, match=f"{layer}: the LoRA has shape .* belongs to another model"):
        Merger(BaseReader(str(tmp_path / "base")), [({layer: wider}, 1.0)], None)
