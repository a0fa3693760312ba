"""Z-Image's LoRA files against diffusers' own loader, layer by layer, and what is said of others'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.header import open_lora
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate, Update
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.models.shared.lora_layout import ALPHA, DOWN, UP, Layout
from simpletune.models.zimage.zimage_lora import LAYOUTS, NAMES
from simpletune.system.options import UserError

TOLD = {"modelspec.architecture": "Z-Image/lora"}
"""Of a tiny model, whose width does not tell it from Lumina 2 in fused names."""


def transformer() -> ZImageTransformer2DModel:
    torch.manual_seed(0)
    return ZImageTransformer2DModel(
        dim=48, n_layers=2, n_refiner_layers=1, n_heads=3, n_kv_heads=3, cap_feat_dim=32, axes_dims=[4, 6, 6]
    )


SHAPES = {name: tuple(m.weight.shape) for name, m in transformer().named_modules() if isinstance(m, nn.Linear)}
IN_BLOCKS = [name for name in SHAPES if name.startswith(("noise_refiner", "context_refiner", "layers"))]


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
    model, pipeline = transformer(), ZImagePipeline
    tensors, metadata = pipeline.lora_state_dict(str(file), return_lora_metadata=True, local_files_only=True)
    if not all("lora" in key or "lokr" in key for key in tensors):  # as in load_lora_weights
        raise ValueError("Invalid adapter checkpoint")
    pipeline.load_lora_into_transformer(tensors, model, metadata=metadata)
    layers = {name: each for name, each in model.named_modules() if hasattr(each, "get_delta_weight")}
    return {name: each.get_delta_weight("default_0") for name, each in layers.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Update]) -> None:
    assert found.keys() == wanted.keys()
    for layer, update in wanted.items():
        torch.testing.assert_close(found[layer], update.delta(), rtol=1e-5, atol=1e-5)


def foreign(layout: Layout, alpha: bool) -> tuple[dict[str, Tensor], dict[str, Update]]:
    """A file of another trainer in a layout: rank 4, one first factor for what the layout fuses."""
    tensors: dict[str, Tensor] = {}
    wanted: dict[str, Update] = {}
    draw, downs = torch.Generator().manual_seed(2), dict[str, Tensor]()
    for layer in IN_BLOCKS:
        module, rows = layout.place(layer)
        outputs, inputs = SHAPES[layer]
        down = downs.setdefault(module, torch.randn(4, inputs, generator=draw))
        up = torch.randn(outputs, 4, generator=draw)
        wanted[layer] = LoraUpdate(down, up, 0.5 if alpha else 1.0)
        tensors[layout.key(module, DOWN)] = down
        whole = tensors.setdefault(layout.key(module, UP), torch.zeros(rows.whole(outputs) if rows else outputs, 4))
        whole[rows.within(len(whole)) if rows else slice(None)] = up
        if alpha:
            tensors[layout.key(module, ALPHA)] = torch.tensor(2.0)
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
    save_file(tensors, file, TOLD)
    assert (header := open_lora(file)).layout is layout and not header.unmatched
    assert_same({layer: update.delta() for layer, update in read_lora(file).items()}, wanted)
    tools = {each["tool"]: each["loads"] for each in describe(file)["tools"]}
    unread = layout.name in ("kohya-split", "peft", "onetrainer")  # the first is musubi-tuner's
    assert (tools["ComfyUI"], tools["Forge"]) == ("silently nothing" if unread else "yes", "refuses")
    try:
        found = in_diffusers(file)
    except ValueError:
        assert tools["diffusers"] == "refuses"
    else:
        few = "partly" if found else "silently nothing"
        assert tools["diffusers"] == ("yes" if len(found) == len(wanted) else few)
        assert_same(found, {layer: wanted[layer] for layer in found})


@pytest.mark.parametrize("layers", [IN_BLOCKS, list(SHAPES)], ids=["blocks", "all"])
@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy", "comfy-split"])
def test_what_is_written_is_read_here_and_by_diffusers_as_far_as_is_said(
    layout: str, layers: list[str], tmp_path: Path
) -> None:
    """Fused q, k and v have three times the rank, and alpha with it."""
    wanted = updates(layers)
    file = write_lora(wanted, tmp_path / "a.safetensors", layout, None, TOLD, NAMES)
    assert_same({layer: update.delta() for layer, update in read_lora(file).items()}, wanted)
    found, tensors = in_diffusers(file), load_file(file)
    assert any(key.endswith(".alpha") for key in tensors) == (layout == "kohya")
    assert_same(found, {layer: wanted[layer] for layer in found})
    said = {each["tool"]: each for each in describe(file)["tools"]}["diffusers"]
    lost = len(wanted) - len(found)
    outside = 0 if layers is IN_BLOCKS else 3
    assert lost == {"comfy": 16 + outside, "kohya": outside}.get(layout, 0)
    assert said["loads"] == ("partly" if lost else "yes")
    if layout == "kohya":
        key = "lora_unet_layers_0_attention_qkv"
        assert len(tensors[f"{key}.lora_down.weight"]) == 12 and float(tensors[f"{key}.alpha"]) == 6


def test_a_file_of_musubi_tuner_is_converted_for_comfyui(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = next(each for each in LAYOUTS if each.name == "kohya-split")
    tensors, wanted = foreign(layout, True)
    save_file(tensors, tmp_path / "musubi.safetensors", {"ss_network_module": "networks.lora_zimage"})
    assert main(["inspect", str(tmp_path / "musubi.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "silently nothing" in said and "export to diffusers" in said
    out = tmp_path / "out.safetensors"
    assert main(["export", str(tmp_path / "musubi.safetensors"), "--format", "diffusers", "--out", str(out)]) == 0
    assert {each["tool"]: each["loads"] for each in describe(out)["tools"]}["ComfyUI"] == "yes"
    assert_same(in_diffusers(out), wanted)
    assert open_lora(out).metadata["modelspec.architecture"] == "Z-Image/lora"


def test_a_lora_of_lumina_2_is_refused_by_name(tmp_path: Path) -> None:
    def refusal(name: str, inputs: int) -> str | None:
        pair = {f"{name}.lora_A.weight": torch.ones(2, inputs), f"{name}.lora_B.weight": torch.ones(8, 2)}
        save_file(pair, tmp_path / "x.safetensors")
        try:
            open_lora(tmp_path / "x.safetensors")
        except UserError as error:
            return str(error).partition("is a LoRA for ")[2].partition(" (")[0]
        return None

    block = "diffusion_model.layers.0."
    assert refusal(f"{block}attention.to_q", 3840) is None
    assert refusal(f"{block}attention.to_q", 48) is None  # no other model has this name
    assert refusal(f"{block}feed_forward.w2", 10240) is None
    assert refusal(f"{block}attention.qkv", 2304) == refusal(f"{block}attn.to_q", 2304) == "Lumina 2"
    assert refusal(f"{block}feed_forward.w2", 9216) == "Z-Image or Lumina 2"
