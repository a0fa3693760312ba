"""Qwen-Image's LoRA files against diffusers' own loader, layer by layer, and what is said of others'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.header import open_lora
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate, Update
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.models.qwen_image.qwen_image_lora import LAYOUTS, NAMES
from simpletune.models.shared.lora_layout import ALPHA, DOWN, UP, Layout
from simpletune.system.options import UserError


def transformer() -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


SHAPES = {name: tuple(m.weight.shape) for name, m in transformer().named_modules() if isinstance(m, nn.Linear)}
IN_BLOCKS = [name for name in SHAPES if name.startswith("transformer_blocks.")]


def updates(layers: list[str]) -> dict[str, Update]:
    """Rank 4, alpha 2, as in the table of layouts; ranks differ in one layer."""
    draw = torch.Generator().manual_seed(1)
    found: dict[str, Update] = {}
    for number, layer in enumerate(layers):
        (outputs, inputs), rank = SHAPES[layer], 3 if number == 5 else 4
        down, up = torch.randn(rank, inputs, generator=draw), torch.randn(outputs, rank, generator=draw)
        found[layer] = LoraUpdate(down, up, 2 / rank)
    return found


def in_diffusers(file: Path) -> dict[str, Tensor]:
    """What diffusers' pipeline adds to each weight; nothing if it loads nothing. Raises what it raises."""
    model, pipeline = transformer(), QwenImagePipeline
    tensors, metadata = pipeline.lora_state_dict(str(file), return_lora_metadata=True, local_files_only=True)
    if not all("lora" in key for key in tensors):  # as in load_lora_weights
        raise ValueError("Invalid LoRA checkpoint")
    pipeline.load_lora_into_transformer(tensors, model, metadata=metadata)
    layers = {name: each for name, each in model.named_modules() if hasattr(each, "get_delta_weight")}
    return {name: each.get_delta_weight("default_0") for name, each in layers.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Update]) -> None:
    assert found.keys() == wanted.keys()
    for layer, update in wanted.items():
        torch.testing.assert_close(found[layer], update.delta(), rtol=1e-5, atol=1e-5)


def foreign(layout: Layout, alpha: bool) -> tuple[dict[str, Tensor], dict[str, Update]]:
    """A file of another trainer in a layout: rank 4."""
    tensors: dict[str, Tensor] = {}
    wanted: dict[str, Update] = {}
    draw = torch.Generator().manual_seed(2)
    for layer in IN_BLOCKS:
        outputs, inputs = SHAPES[layer]
        down, up = torch.randn(4, inputs, generator=draw), torch.randn(outputs, 4, generator=draw)
        wanted[layer] = LoraUpdate(down, up, 0.5 if alpha else 1.0)
        tensors |= {layout.key(layer, DOWN): down, layout.key(layer, UP): up}
        if alpha:
            tensors[layout.key(layer, ALPHA)] = torch.tensor(2.0)
    return tensors, wanted


def cases() -> Iterator[Any]:
    for layout in LAYOUTS:
        for alpha in (False, True):
            yield pytest.param(layout, alpha, id=f"{layout.name}{'-alpha' if alpha else ''}")


@pytest.mark.parametrize(("layout", "alpha"), cases())
def test_a_file_of_any_layout_is_read_with_its_alpha_and_said_to_load_where_it_does(
    layout: Layout, alpha: bool, tmp_path: Path
) -> None:
    tensors, wanted = foreign(layout, alpha)
    file = tmp_path / "x.safetensors"
    save_file(tensors, file)
    assert (header := open_lora(file)).layout is layout and not header.unmatched
    assert_same({layer: update.delta() for layer, update in read_lora(file).items()}, wanted)
    tools = {each["tool"]: each["loads"] for each in describe(file)["tools"]}
    unread = layout.name in ("peft", "onetrainer")
    assert (tools["ComfyUI"], tools["Forge"]) == ("silently nothing" if unread else "yes", "refuses")
    try:
        found = in_diffusers(file)
    except ValueError:
        assert tools["diffusers"] == "refuses"
    else:
        assert tools["diffusers"] == ("yes" if found else "silently nothing")
        assert_same(found, wanted if found else {})


@pytest.mark.parametrize("kind", ["magnitudes", "scales", "lokr", "oft", "unmatched"])
@pytest.mark.parametrize(("layout", "alpha"), cases())
def test_what_is_said_of_other_methods_is_what_diffusers_does(
    layout: Layout, alpha: bool, kind: str, tmp_path: Path
) -> None:
    tensors, _ = foreign(layout, alpha)
    alphas = {key: tensor for key, tensor in tensors.items() if key.endswith(ALPHA)}
    of_layers = {
        "magnitudes": lambda outputs, inputs: {"lora_magnitude_vector": torch.ones(outputs)},
        "scales": lambda outputs, inputs: {"dora_scale": torch.ones(outputs, 1)},
        "lokr": lambda outputs, inputs: {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(outputs // 2, inputs // 2)},
        "oft": lambda outputs, inputs: {"oft_blocks": torch.zeros(2, outputs // 2, outputs // 2)},
        "unmatched": lambda outputs, inputs: {},
    }
    more = {layout.key(layer, role): tensor for layer in IN_BLOCKS
            for role, tensor in of_layers[kind](*SHAPES[layer]).items()}  # fmt: skip
    if kind in ("lokr", "oft"):
        tensors = alphas if kind == "lokr" else {}
    if kind == "unmatched":
        more = {layout.key("nowhere.x", role): torch.ones(4, 4) for role in (DOWN, UP)}
    file = tmp_path / "x.safetensors"
    save_file(tensors | more, file)
    said = {each["tool"]: each for each in describe(file)["tools"]}["diffusers"]
    try:
        found = in_diffusers(file)
    except ValueError:
        assert said["loads"] == "refuses"
        return
    loads = "yes" if kind != "unmatched" else "partly"
    assert said["loads"] == (loads if found else "silently nothing")
    if kind == "scales" and found:
        assert "wrong without it" in str(said["notes"])


@pytest.mark.parametrize("layers", [IN_BLOCKS, list(SHAPES)], ids=["blocks", "all"])
@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
def test_what_is_written_is_read_here_and_by_diffusers(layout: str, layers: list[str], tmp_path: Path) -> None:
    wanted = updates(layers)
    file = write_lora(wanted, tmp_path / "a.safetensors", layout, None, {}, NAMES)
    assert_same({layer: update.delta() for layer, update in read_lora(file).items()}, wanted)
    assert_same(in_diffusers(file), wanted)
    assert any(key.endswith(".alpha") for key in load_file(file)) == (layout == "kohya")
    assert {each["tool"]: each["loads"] for each in describe(file)["tools"]}["diffusers"] == "yes"


def test_a_file_of_musubi_tuner_is_converted(tmp_path: Path) -> None:
    layout = next(each for each in LAYOUTS if each.name == "kohya")
    tensors, wanted = foreign(layout, True)
    save_file(tensors, tmp_path / "musubi.safetensors", {"ss_network_module": "networks.lora_qwen_image"})
    out = tmp_path / "out.safetensors"
    assert main(["export", str(tmp_path / "musubi.safetensors"), "--format", "diffusers", "--out", str(out)]) == 0
    assert_same(in_diffusers(out), wanted)
    assert open_lora(out).metadata["modelspec.architecture"] == "Qwen-Image/lora"


def test_names_that_other_models_have_are_told_apart(tmp_path: Path) -> None:
    """By a network, by the number of a block, by the header; else refused with those that it may be for."""

    def refusal(name: str, inputs: int, told: dict[str, str] | None = None) -> str | None:
        pair = {f"{name}.lora_A.weight": torch.ones(2, inputs), f"{name}.lora_B.weight": torch.ones(8, 2)}
        save_file(pair, tmp_path / "x.safetensors", told)
        try:
            header = open_lora(tmp_path / "x.safetensors")
        except UserError as error:
            return str(error).partition("is a LoRA for ")[2].partition(" (")[0]
        assert header.family.model.startswith("Qwen-Image")
        return None

    block = "transformer.transformer_blocks."
    assert refusal(f"{block}0.img_mlp.net.2", 12288) is None
    assert refusal(f"{block}41.attn.to_q", 3072) is None
    assert refusal(f"{block}3.attn.to_q", 3072) == "Flux.1, FLUX.2 klein 4B or Qwen-Image"
    assert refusal(f"{block}3.attn.to_q", 3072, {"ss_base_model_version": "qwen_image"}) is None
    assert refusal(f"{block}3.img_mlp.gate_layer", 3072) == "Qwen-Image-2.1"
