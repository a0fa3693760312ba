"""LoRA for U-Nets: targets, 1x1 convolutions, and files that diffusers, ComfyUI and kohya's tools apply as we do."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import original_layout
import original_sd15
import pytest
import tiny_sd15
import torch
import unet_lora_readers
from blocks import copy_model
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from original_layout import original_attention
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpletune.adapters.files.attach import fold_lora, load_loras, require_layers
from simpletune.adapters.files.describe import describe, find_weight_file
from simpletune.adapters.files.mix import Recipe, mix
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import file_tensors, write_lora
from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.lora_layers import add_pointwise_update, lora_layers
from simpletune.apps.cli.main import main
from simpletune.engine.quant.precision import FP32
from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.models.sd15.sd15_files import origins_beside
from simpletune.models.sd15.sd15_lora import NAMES
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.text.clip import load_text_model
from simpletune.runs.weights_names import find_named
from simpletune.system.options import UserError

KOHYA, DIFFUSERS, COMFY, ORIGINAL = LAYOUTS[NAMES][:4]
TINY = {  # attention in the second level only: PEFT takes a while for each layer
    "sample_size": 8, "block_out_channels": (32, 64), "cross_attention_dim": 768, "attention_head_dim": 2,
    "norm_num_groups": 8, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "SD 1.5": {"cross_attention_dim": 768},
    "SD 2.1": {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True},
    "SDXL": {
        "cross_attention_dim": 2048, "block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20),
        "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    },
}  # fmt: skip
HEADER = {
    "modelspec.architecture": "stable-diffusion-v1/lora", "ss_network_module": "networks.lora",
    "ss_base_model_version": "sd_v1", "ss_v2": "False",
}  # fmt: skip


@functools.cache
def shapes_of_size(name: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = UNet2DConditionModel(**SIZES[name])
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@functools.cache
def untouched(layers_per_block: int = 1) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(**TINY, layers_per_block=layers_per_block).requires_grad_(False)


def tiny(layers_per_block: int = 1) -> UNet2DConditionModel:
    return copy_model(untouched(layers_per_block))


@torch.no_grad()
def predict(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    z_t, prompt = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 768, generator=generator)
    return model(z_t, torch.tensor([3, 700]), prompt).sample


def close(actual: Tensor, expected: Tensor) -> None:
    """fp32, 1e-5 of the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def random_updates(
    model: nn.Module, rank: Callable[[int], int], alpha: Callable[[int], float]
) -> dict[str, LoraUpdate]:
    """Updates of kohya's set of layers, large enough to show; rank and alpha by the layer's number."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {}
    for number, name in enumerate(Lora(targets="all_linear").modules(shapes)):
        o, i, *sides = shapes[f"{name}.weight"]
        r = rank(number)
        down, up = torch.randn(r, i, generator=generator), torch.randn(o, r, generator=generator)
        found[name] = LoraUpdate(down, 0.05 * up, alpha(number) / r, kernel=tuple(sides))
    return found


def patched(updates: dict[str, LoraUpdate], layers_per_block: int = 1, strength: float = 1.0) -> UNet2DConditionModel:
    """A tiny U-Net with W + strength scale B A, by the definition."""
    model = tiny(layers_per_block)
    state = model.state_dict()
    for name, update in updates.items():
        weight = state[f"{name}.weight"]
        weight += (strength * update.scale * update.up @ update.down).reshape(weight.shape)
    return model


def in_diffusers(file: Path, model: UNet2DConditionModel) -> Tensor:
    """What diffusers' pipeline makes of a file."""
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    parts |= {"unet": model, "scheduler": DDIMScheduler()}
    pipeline = StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.load_lora_weights(file)
    return predict(model)


def by_the_rules(file: Path, names_of: Callable[..., dict[str, str]] = unet_lora_readers.kohya_names) -> Tensor:
    """What kohya's scripts (or ComfyUI) make of a file."""
    state, model = untouched().state_dict(), tiny()
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    changed, unused = unet_lora_readers.apply(state, tensors, names_of(state))
    assert unused == []
    model.load_state_dict(changed)
    return predict(model)


def as_processors(tensors: dict[str, Tensor], prefix: str = "unet.") -> dict[str, Tensor]:
    """Keys of old diffusers, from those of its layout today."""
    found = {}
    for key, tensor in tensors.items():
        module, _, letter = key.removeprefix("unet.").removesuffix(".weight").rpartition(".lora_")
        module = module.replace(".to_", ".processor.to_").replace(".to_out.0", ".to_out")
        separator = "_" if ".processor." in module else "."
        found[f"{prefix}{module}{separator}lora.{'down' if letter == 'A' else 'up'}.weight"] = tensor
    return found


same = functools.partial(random_updates, rank=lambda n: 4, alpha=lambda n: 2.0)
mixed = functools.partial(random_updates, rank=lambda n: 2 + n % 3, alpha=lambda n: 1.0 + n % 4)


@pytest.mark.parametrize(
    ("targets", "modules", "parameters"),
    [
        ("attention_qv", (64, 64, 280), (99_648, 103_744, 725_760)),
        ("attention", (128, 128, 560), (199_296, 207_488, 1_451_520)),
        (["attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0"], (64, 64, 280), (99_456, 107_648, 785_920)),
        ("attention_mlp", (160, 160, 700), (374_016, 382_208, 2_616_320)),
        ("all_linear", (192, 192, 722), (423_936, 432_128, 2_659_840)),
    ],
    ids=str,
)
def test_targets_update_the_layers_that_other_trainers_update(targets: Any, modules: tuple, parameters: tuple) -> None:
    for number, size in enumerate(SIZES):
        shapes = shapes_of_size(size)
        for rank in (1, 16):
            lora = Lora(targets=targets, rank=rank)
            assert (len(lora.modules(shapes)), lora.trainable(shapes)) == (modules[number], rank * parameters[number])
        assert list(lora.problems(shapes)) == []
        ends = {name.rpartition(".")[2] for name in lora.modules(shapes)}
        assert targets != "attention_qv" or ends == {"to_q", "to_v"}
    about = Lora(targets=targets).describe(shapes_of_size("SD 1.5"))
    assert ("160 linear layers and 32 1x1 convolutions (all_linear)" in about) == (targets == "all_linear")


def test_targets_of_sd3_are_its_own() -> None:
    shapes = parameter_shapes(SD3().files.known_config())
    dual = parameter_shapes(SD3().files.known_config() | {"dual_attention_layers": (0, 1)})
    numbers = {  # without and with second attentions in two blocks
        "attention": (191, 191 + 8), "attention_qv": (96, 96 + 4), "attention_mlp": (191 + 94, 191 + 94 + 8),
        "attention_image": (96, 96 + 8),
    }  # fmt: skip
    for targets, expected in numbers.items():
        assert tuple(len(Lora(targets=targets).modules(each)) for each in (shapes, dual)) == expected
    found = {name.rpartition(".")[2] for name in Lora(targets="attention_qv").modules(shapes)}
    assert found == {"to_q", "to_v", "add_q_proj", "add_v_proj"}


def test_a_target_that_the_model_lacks_is_refused_with_those_it_has() -> None:
    (problem,) = Lora(targets="attention_image").problems(shapes_of_size("SD 1.5"))
    assert problem.message == (
        "'attention_image' names no layer of this model. Use attention, attention_qv, attention_mlp, all_linear"
    )
    (problem,) = Lora(targets=["attn1.to_q", "conv1"]).problems(shapes_of_size("SD 1.5"))  # conv1 is 3x3
    assert problem.message == (
        "'conv1' matches only convolutions with a kernel larger than 1x1. Give them a rank by adapter.conv_rank"
    )
    (problem,) = Lora(targets="attention_image", conv_rank=4).problems(shapes_of_size("SD 1.5"))
    assert problem.path == "adapter.targets" and problem.message.startswith("'attention_image' names no layer")


@pytest.mark.parametrize("scale", [0.7, 1.0])
@pytest.mark.parametrize("frozen", [(), ("x",), ("a", "b")], ids=["all", "input frozen", "update frozen"])
def test_the_gradients_of_a_1x1_convolution_are_those_of_the_sum(frozen: tuple[str, ...], scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 6, 3, 2), "w": (8, 6, 1, 1), "a": (3, 6), "b": (8, 3)}
    x, w, a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes.values())
    for name, tensor in {"x": x, "a": a, "b": b}.items():
        tensor.requires_grad_(name not in frozen)
    conv = nn.functional.conv2d
    torch.autograd.gradcheck(lambda *t: add_pointwise_update(conv(t[0], w), *t, scale), (x, a, b))
    y = conv(x, w).detach()
    place, expected = y.data_ptr(), y + scale * conv(conv(x, a[:, :, None, None]), b[:, :, None, None])
    found = add_pointwise_update(y, x, a, b, scale)
    assert found.data_ptr() == place
    torch.testing.assert_close(found, expected)
    last = (t.detach().to(memory_format=torch.channels_last) for t in (conv(x, w), x))
    torch.testing.assert_close(add_pointwise_update(*last, a, b, scale), expected)


def test_a_u_net_with_updates_computes_what_plain_peft_does() -> None:
    ours, theirs = tiny(), tiny()
    Lora(rank=3, alpha=2.0, targets="all_linear").attach(ours, 0)
    modules = [name for name, _ in lora_layers(ours)]
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=2.0, target_modules=modules), theirs)
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(modules) == 2 * 4 * 12 and {p.ndim for p in trained.values()} == {2, 4}
    generator = torch.Generator().manual_seed(2)
    twins = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            twins[name].copy_(parameter)
    close(predict(ours), predict(theirs))
    assert (predict(ours) - predict(untouched())).abs().max() > 0.1
    generator.manual_seed(3)
    z_t, prompt = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 768, generator=generator)
    for model in (ours, theirs):
        model(z_t, torch.tensor([10, 900]), prompt).sample.square().mean().backward()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, twins[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_result_of_a_run_does_the_same_in_every_reader(dtype: str, tmp_path: Path) -> None:
    model = tiny()
    lora = Lora(rank=3, alpha=1.5, targets="all_linear", dtype=dtype)
    lora.attach(model, 0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    file = lora.export(model, tmp_path, {"format": "pt"})
    tensors = load_file(file)
    projection = "lora_unet_mid_block_attentions_0_proj_in"
    query = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    assert tensors[f"{projection}.lora_down.weight"].shape == (3, 64, 1, 1)
    assert tensors[f"{projection}.lora_up.weight"].shape == (64, 3, 1, 1)
    assert tensors[f"{query}.lora_down.weight"].shape == (3, 64) and tensors[f"{query}.alpha"].item() == 1.5
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert len(tensors) == 3 * 4 * 12 and tensors[f"{query}.lora_up.weight"].dtype == kept
    expected = predict(model)
    assert (expected - predict(untouched())).abs().max() > 0.1
    for names_of in (unet_lora_readers.kohya_names, unet_lora_readers.comfy_names):
        close(by_the_rules(file, names_of), expected)
    again = tiny()
    load_loras(again, [(file, 1.0)])
    close(predict(again), expected)
    fold_lora(again)
    close(predict(again), expected)
    if dtype == "fp32":
        close(in_diffusers(file, tiny()), expected)


@pytest.mark.parametrize(
    ("updates_of", "layout"),
    [
        pytest.param(same, "diffusers", id="one rank"),
        *(pytest.param(mixed, layout, id=f"ranks and alphas, {layout}") for layout in ("kohya", "diffusers")),
    ],
)
def test_every_layout_does_the_same_in_diffusers(layout: str, updates_of: Any, tmp_path: Path) -> None:
    updates = updates_of(untouched())
    file = write_lora(updates, tmp_path / "x.safetensors", layout)
    expected = predict(patched(updates))
    assert (expected - predict(untouched())).abs().max() > 0.1
    close(in_diffusers(file, tiny()), expected)
    ours = tiny()
    load_loras(ours, [(file, 0.5)])
    close(predict(ours), predict(patched(updates, strength=0.5)))
    about = describe(file)
    tools = {tool["tool"]: tool for tool in about["tools"]}
    assert tools["diffusers"] == {"tool": "diffusers", "loads": "yes", "notes": []}
    assert tools["ComfyUI"]["loads"] == {"kohya": "yes", "diffusers": "partly"}[layout]
    assert about["targets"]["proj_in"] == about["targets"]["attn1.to_q"] == about["layers"] // 12


def test_a_result_with_other_ranks_and_alphas_in_some_layers_is_the_same_in_diffusers(tmp_path: Path) -> None:
    layers = [
        {"pattern": "down.1", "rank": 2, "alpha": 3.0},
        {"pattern": "mid", "rank": 5},
        {"pattern": "to_v", "rank": 0},
    ]
    lora, model = Lora(rank=3, alpha=2.0, targets="all_linear", layers=layers), tiny()
    lora.attach(model, 0)
    draw = torch.Generator().manual_seed(2)
    for _, layer in lora_layers(model):
        layer.lora_B["default"].weight.data.normal_(0, 0.2, generator=draw)
    file, expected = lora.export(model, tmp_path, {}), predict(model)
    close(in_diffusers(file, tiny()), expected)
    assert (expected - predict(untouched())).abs().max() > 0.01
    about = describe(file)
    assert about["ranks"] == {"2": 10, "3": 20, "5": 10} and "different alphas" not in str(about["tools"])


def test_different_alphas_are_read_right_but_not_by_diffusers(tmp_path: Path) -> None:
    """Which is why files get one alpha; ``inspect`` says it of others' files."""
    file = tmp_path / "x.safetensors"
    updates = mixed(untouched())
    one = file_tensors(updates, KOHYA)
    assert len({t.item() for name, t in one.items() if name.endswith(".alpha")}) == 1
    tensors = {}
    for name, update in updates.items():
        factors, alpha = update.file_factors()
        tensors |= {KOHYA.key(name, role): factor.clone() for role, factor in factors.items()}
        tensors[KOHYA.key(name, "alpha")] = torch.tensor(alpha)
    save_file(tensors, file)
    expected = predict(patched(updates))
    model = tiny()
    load_loras(model, [(file, 1.0)])
    close(predict(model), expected)
    assert (in_diffusers(file, tiny()) - expected).abs().max() > 0.01
    tools = {tool["tool"]: tool for tool in describe(file)["tools"]}
    assert "modules have different alphas: the most common one is" in tools["diffusers"]["notes"][0]
    assert tools["ComfyUI"] == {"tool": "ComfyUI", "loads": "yes", "notes": []}


def test_round_trips_keep_every_bit(tmp_path: Path) -> None:
    updates = random_updates(untouched(), lambda n: 3, lambda n: 3.0)
    first = load_file(write_lora(updates, tmp_path / "a.safetensors", "kohya"))
    write_lora(read_lora(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", "diffusers")
    last = load_file(write_lora(read_lora(tmp_path / "b.safetensors"), tmp_path / "c.safetensors", "kohya"))
    assert set(first) == set(last) and all(torch.equal(first[key], last[key]) for key in first)
    assert {key.partition(".")[0] for key in load_file(tmp_path / "b.safetensors")} == {"unet"}


@functools.cache
def folded() -> tuple[dict[str, LoraUpdate], Tensor]:
    """Updates of a U-Net with two layers a level, and what it predicts with them."""
    updates = {name: update.folded() for name, update in same(untouched(2)).items()}
    return updates, predict(patched(updates, 2))


@pytest.mark.parametrize("way", ["processors", "bare processors", "peft", "bare", "comfy", "original"])
def test_other_tools_keys_are_read(way: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    updates, expected = folded()
    today = file_tensors(updates, DIFFUSERS)
    layout = {"comfy": COMFY, "original": ORIGINAL}.get(way, DIFFUSERS)
    tensors = {
        "processors": as_processors(today),
        "bare processors": as_processors(today, ""),
        "peft": {key.replace("unet.", "base_model.model."): tensor for key, tensor in today.items()},
        "bare": {key.removeprefix("unet."): tensor for key, tensor in today.items()},
    }.get(way)
    if tensors is None:
        saved = {original_attention(name): update.file_factors()[0] for name, update in updates.items()}
        tensors = {layout.key(name, role): f.clone() for name, roles in saved.items() for role, f in roles.items()}
    save_file(tensors, file)
    read = read_lora(file)
    assert set(read) == set(updates)
    for name, update in updates.items():
        assert torch.equal(read[name].up, update.up) and torch.equal(read[name].down, update.down)
        assert read[name].scale == update.scale and read[name].kernel == update.kernel
    tools = {tool["tool"]: tool for tool in describe(file)["tools"]}
    if tools["diffusers"]["loads"] == "refuses":
        with pytest.raises(ValueError, match="not found in the base model|No modules were targeted|Target modules"):
            in_diffusers(file, tiny(2))
    else:
        silent = tools["diffusers"]["loads"] == "silently nothing"
        close(in_diffusers(file, tiny(2)), predict(untouched(2)) if silent else expected)
    state = untouched(2).state_dict()
    known = unet_lora_readers.comfy_names(state)
    if way not in ("comfy", "original"):  # whose names the reader does not have
        _, unused = unet_lora_readers.apply(state, tensors, known)
        said = {0: "yes", len(tensors): "silently nothing"}.get(len(unused), "partly")
        assert tools["ComfyUI"]["loads"] == said


def test_a_lora_of_another_family_is_refused_by_its_name(tmp_path: Path) -> None:
    from diffusers import SD3Transformer2DModel

    sd3 = SD3Transformer2DModel(sample_size=8, num_layers=1, attention_head_dim=8, num_attention_heads=2,
                                joint_attention_dim=24, caption_projection_dim=16, pooled_projection_dim=14,
                                pos_embed_max_size=5)  # fmt: skip
    of_unet = write_lora(same(untouched()), tmp_path / "unet.safetensors", "kohya")
    narrow = {"transformer_blocks.0.ff.net.2": LoraUpdate(torch.ones(2, 16), torch.ones(16, 2))}
    of_sd3 = write_lora(narrow, tmp_path / "sd3.safetensors", "kohya")
    with pytest.raises(UserError, match="unet.safetensors is for Stable Diffusion 1.5 or 2, and the base "
                       "is Stable Diffusion 3. Give a LoRA for Stable Diffusion 3$"):  # fmt: skip
        load_loras(sd3, [(of_unet, 1.0)])
    with pytest.raises(UserError, match="sd3.safetensors is for Stable Diffusion 3, and the base is Stable "
                       "Diffusion 1.5 or 2. Give"):  # fmt: skip
        load_loras(tiny(), [(of_sd3, 1.0)])
    with pytest.raises(UserError, match="a LoRA is for one model, but these are for several: .* of Stable"):
        mix([(read_lora(of_unet), 1.0), (read_lora(of_sd3), 1.0)], Recipe())
    layer = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
    wide = {layer: LoraUpdate(torch.ones(2, 1024), torch.ones(64, 2))}
    other = write_lora(wide, tmp_path / "sd2.safetensors", "kohya")
    with pytest.raises(UserError, match="sd2.safetensors .for Stable Diffusion 2.: .*has 1024 inputs and 64 outputs"):
        load_loras(tiny(), [(other, 1.0)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder with a U-Net, and LoRA files."""
    place = tmp_path_factory.mktemp("unet")
    untouched().save_pretrained(place / "pipeline" / "unet")
    write_lora(same(untouched()), place / "a.safetensors", "kohya")
    write_lora(mixed(untouched()), place / "b.safetensors", "diffusers")
    return place


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def test_merge_and_extract(folder: Path, tmp_path: Path) -> None:
    pipeline, out = folder / "pipeline", tmp_path / "merged"
    run("merge", f"{folder / 'a.safetensors'}:0.5", "--base", pipeline, "--out", out)
    merged = UNet2DConditionModel.from_pretrained(out)
    expected = predict(patched(same(untouched()), strength=0.5))
    close(predict(merged), expected)
    run("extract", pipeline / "unet", out, "--rank", 4, "--format", "kohya", "--out", tmp_path / "x.safetensors")
    close(by_the_rules(tmp_path / "x.safetensors"), expected)
    assert {update.kernel for update in read_lora(tmp_path / "x.safetensors").values()} == {(1, 1), ()}


@pytest.mark.parametrize("version", ["sd15", "sd2"])
def test_a_pipeline_becomes_a_whole_file_and_from_there_a_folder(version: Any, tmp_path: Path) -> None:
    """With autoencoder and text encoder, which diffusers and we load; the text encoder's updates are merged, too."""
    pipeline, file, twice = tmp_path / "pipeline", tmp_path / "one.safetensors", tmp_path / "twice"
    tiny_sd15.build(pipeline, version)
    layer, width = "encoder.layers.0.self_attn.k_proj", tiny_sd15.TEXT[version]
    update = LoraUpdate(torch.ones(1, width), torch.ones(width, 1), 1.0)
    unet = UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet")
    updates = {
        name: each for name, each in same(unet).items() if name.startswith(("down_blocks.0", "mid", "up_blocks.3"))
    }
    lora = write_lora(updates, tmp_path / "a.safetensors", "kohya")
    both = {**updates, f"text_encoder.text_model.{layer}": update}
    write_lora(both, tmp_path / "both.safetensors", "kohya")
    run("merge", f"{tmp_path / 'both.safetensors'}:0.5", "--base", pipeline, "--out", file)
    expected = {part: original_layout.state_of(pipeline / part) for part in ("unet", "vae", "text_encoder")}
    text = {name.removeprefix("text_model."): tensor for name, tensor in expected["text_encoder"].items()}
    text[f"{layer}.weight"] += 0.5
    expected["text_encoder"] = {name: t for name, t in text.items() if not name.endswith("position_ids")}
    original = {name: tensor.clone() for name, tensor in expected["unet"].items()}
    for name, each in updates.items():
        expected["unet"][f"{name}.weight"] += 0.5 * each.delta().view_as(original[f"{name}.weight"])
    near = {"unet": {"rtol": 1e-5, "atol": 1e-6}}
    ours = SD15(pretrained=str(file), text_encoders=str(pipeline))
    theirs = StableDiffusionPipeline.from_single_file(file, config=str(pipeline), local_files_only=True)
    for part, model in (
        ("unet", ours.load_denoiser(FP32(), torch.device("cpu"))),
        ("vae", ours.autoencoder.load(torch.device("cpu"), torch.float32)),
        ("text_encoder", load_text_model(ours.files.part("text_encoder"), torch.float32, projected=False)),
        *((part, getattr(theirs, part)) for part in expected),
    ):
        found = {name.removeprefix("text_model."): tensor for name, tensor in model.state_dict().items()}
        torch.testing.assert_close(found, expected[part], **near.get(part, {"rtol": 0, "atol": 0}))
    reference = original_sd15.write(pipeline, tmp_path / "reference.safetensors")
    whole, known = (load_file(each) for each in (file, reference))
    assert set(whole) < set(known)
    assert all("alphas" in n or "ema" in n or "cond_stage" in n for n in set(known) - set(whole))
    projection = whole["model.diffusion_model.input_blocks.1.1.proj_in.weight"]
    assert projection.ndim == {"sd15": 4, "sd2": 2}[version]

    if version == "sd15":
        run("merge", f"{lora}:0.25", "--base", file, "--out", twice)
        state = UNet2DConditionModel.from_pretrained(twice).state_dict()
        for name, each in updates.items():
            original[f"{name}.weight"] += 0.75 * each.delta().view_as(original[f"{name}.weight"])
        torch.testing.assert_close(state, original, rtol=1e-5, atol=1e-6)


def test_parts_without_original_names_are_refused_and_published_ones_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"decoder.mid_block.attentions.0.{own}.weight" for own in ("group_norm", "query", "proj_attn")]
    found = [(o.name, o.pointwise) for o in origins_beside("vae", names, {}).values()]
    place = "decoder.mid.attn_1"
    assert found == [(f"{place}.norm.weight", False), (f"{place}.q.weight", True), (f"{place}.proj_out.weight", True)]
    pipeline, lora = tmp_path / "pipeline", tmp_path / "a.safetensors"
    untouched().save_pretrained(pipeline / "unet")
    write_lora(same(untouched()), lora, "kohya")
    (pipeline / "vae").mkdir()
    save_file({"encoder.layers.0.weight": torch.zeros(1)}, pipeline / "vae" / "diffusion_pytorch_model.safetensors")
    words = ["merge", str(lora), "--out", str(tmp_path / "x.safetensors"), "--base"]
    assert main([*words, str(pipeline)]) == 2
    assert "its tensor encoder.layers.0.weight has no name in the original layout of SD 1.5" in capsys.readouterr().err
    run(*words, pipeline / "unet")
    assert all(name.startswith("model.diffusion_model.") for name in load_file(tmp_path / "x.safetensors"))


def test_export_resize_and_mix(folder: Path, tmp_path: Path) -> None:
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    first, second = read_lora(a), read_lora(b)
    run("export", b, "--format", "kohya", "--out", tmp_path / "b.safetensors")
    close(by_the_rules(tmp_path / "b.safetensors"), predict(patched(second)))
    with safe_open(tmp_path / "b.safetensors", framework="pt") as handle:
        metadata = handle.metadata()
    assert {name: metadata.get(name) for name in HEADER} == HEADER and "sd3" not in json.dumps(metadata)
    run("resize", a, "--rank", 6, "--format", "kohya", "--out", tmp_path / "wide.safetensors")
    close(by_the_rules(tmp_path / "wide.safetensors"), predict(patched(first)))
    run("mix", f"{a}:0.7", f"{b}:0.5", "--format", "kohya", "--out", tmp_path / "m.safetensors")
    expected = copy.deepcopy(patched(first, strength=0.7)).state_dict()
    for name, update in second.items():
        weight = expected[f"{name}.weight"]
        weight += 0.5 * update.delta().reshape(weight.shape)
    model = tiny()
    model.load_state_dict(expected)
    close(by_the_rules(tmp_path / "m.safetensors"), predict(model))
    run("export", b, "--format", "comfy", "--out", tmp_path / "c.safetensors")  # a U-Net's is kohya's
    found, kohya = (load_file(tmp_path / f"{name}.safetensors") for name in "cb")
    torch.testing.assert_close(found, kohya, rtol=0, atol=0)


def test_full_fine_tuning_exports_a_u_nets_folder(tmp_path: Path) -> None:
    model = tiny()
    written = Full().export(model, tmp_path, {"format": "pt"})
    assert written == tmp_path / "unet"
    close(predict(UNet2DConditionModel.from_pretrained(written)), predict(model))
    assert find_named(str(tmp_path)).denoiser == written and find_weight_file(tmp_path).parent == written
    assert Full().result("unet") == "unet" and Lora().result("unet") == "pytorch_lora_weights.safetensors"


def test_a_lora_of_which_the_model_lacks_one_layer_names_it_rather_than_another_model() -> None:
    state = {"transformer_blocks.0.attn.to_q": LoraUpdate(torch.ones(2, 16), torch.ones(16, 2))} | same(untouched())
    with pytest.raises(UserError, match=rf"x: 1 of {len(state)} layers are not in this model: transformer_blocks.0"):
        require_layers("x", state, tiny())
