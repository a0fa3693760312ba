"""klein's LoRA files against diffusers' own loader, layer by layer, and what is said of others'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.header import open_lora
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LokrUpdate, LoraUpdate, Update
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.models.flux2.flux2_lora import LAYOUTS, NAMES
from simpletune.models.shared.lora_layout import ALPHA, DOWN, UP, Layout
from simpletune.system.options import UserError

BY_NAME = {layout.name: layout for layout in LAYOUTS}
TOLD = {"modelspec.architecture": "Flux.2-klein-4b/lora"}
"""Of a tiny model, whose width does not tell it from Flux.1."""


def transformer() -> Flux2Transformer2DModel:
    torch.manual_seed(0)
    return Flux2Transformer2DModel(
        patch_size=1, in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=48, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip


SHAPES = {name: tuple(m.weight.shape) for name, m in transformer().named_modules() if isinstance(m, nn.Linear)}
IN_BLOCKS = [name for name in SHAPES if "blocks." in name]


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
    model, pipeline = transformer(), Flux2KleinPipeline
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


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
def test_diffusers_loads_what_is_written_layer_by_layer(layout: str, tmp_path: Path) -> None:
    wanted = updates(IN_BLOCKS)
    file = write_lora(wanted, tmp_path / "a.safetensors", layout, None, TOLD, NAMES)
    assert_same(in_diffusers(file), wanted)
    assert_same({layer: update.delta() for layer, update in read_lora(file).items()}, wanted)
    alphas = [key for key in load_file(file) if key.endswith(".alpha")]
    assert bool(alphas) == (layout == "kohya")


def test_layers_outside_the_blocks_are_read_as_diffusers_writes_them(tmp_path: Path) -> None:
    """All in its own layout; ComfyUI's has the halves of norm_out the other way round, which its converter leaves."""
    wanted = updates(list(SHAPES))
    for layout in ("diffusers", "comfy"):
        file = write_lora(wanted, tmp_path / f"{layout}.safetensors", layout, None, TOLD, NAMES)
        assert_same({layer: update.delta() for layer, update in read_lora(file).items()}, wanted)
        found = in_diffusers(file)
        if layout == "comfy":
            found["norm_out.linear"] = torch.cat(found["norm_out.linear"].chunk(2)[::-1])
        assert_same(found, wanted)
    kohya = write_lora(wanted, tmp_path / "kohya.safetensors", "kohya", None, TOLD, NAMES)
    assert_same({layer: update.delta() for layer, update in read_lora(kohya).items()}, wanted)
    said = {each["tool"]: each for each in describe(kohya)["tools"]}["diffusers"]
    dropped = wanted.keys() - in_diffusers(kohya).keys()
    assert (said["loads"], len(dropped)) == ("partly", 4) and said["notes"][0].startswith("drops 4 of")


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
    try:
        found = in_diffusers(file)
    except ValueError:
        assert tools["diffusers"] == "refuses"
        return
    assert tools["diffusers"] == ("yes" if found else "silently nothing")
    if found:
        assert_same(found, wanted)
    assert in_diffusers(write_lora(read_lora(file), tmp_path / "y.safetensors", "diffusers")).keys() == wanted.keys()


@pytest.mark.parametrize("rank", [None, 2])
def test_diffusers_reads_lokr_of_the_blocks(rank: int | None, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)

    def factors(outputs: int, inputs: int) -> dict[str, Tensor]:
        first, second = torch.randn(2, 2, generator=draw), torch.randn(outputs // 2, inputs // 2, generator=draw)
        if rank is None:
            return {"lokr_w1": first, "lokr_w2": second}
        return {"lokr_w1": first, "lokr_w2_a": second[:, :rank], "lokr_w2_b": second[:rank]}

    wanted: dict[str, Update] = {
        layer: LokrUpdate(factors(*SHAPES[layer]), SHAPES[layer][0], scale=0.5) for layer in IN_BLOCKS
    }
    file = write_lora(wanted, tmp_path / "a.safetensors", "lycoris", names=NAMES)
    assert_same(in_diffusers(file), wanted)
    assert describe(file)["tools"][0]["loads"] == "yes"


def pair(name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(2, inputs), f"{name}.lora_B.weight": torch.ones(outputs, 2)}


def test_a_lora_of_a_larger_flux_2_and_one_that_may_be_flux_1_s_are_refused_by_name(tmp_path: Path) -> None:
    def refusal(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str | None:
        save_file(tensors, tmp_path / "x.safetensors", metadata)
        try:
            open_lora(tmp_path / "x.safetensors")
        except UserError as error:
            return str(error).partition("is a LoRA for ")[2].partition(" (")[0]
        return None

    own, joint = "transformer.single_transformer_blocks.0.attn.", "diffusion_model.double_blocks.0."
    assert refusal(pair(f"{own}to_qkv_mlp_proj", 3072, 27648)) is None
    assert refusal(pair(f"{own}to_qkv_mlp_proj", 4096, 36864)) == "FLUX.2 klein 9B"
    assert refusal(pair(f"{own}to_out", 24576, 6144)) == "FLUX.2 dev"
    assert refusal(pair(f"{joint}txt_mlp.2", 9216, 3072)) is None  # Flux.1's reads 12288
    assert refusal(pair(f"{joint}img_attn.proj", 3072, 3072)) == "Flux.1 or FLUX.2 klein 4B"
    told = {"ss_base_model_version": "flux_2_klein_4b"}
    assert refusal(pair(f"{joint}img_attn.proj", 3072, 3072), told) is None
    assert refusal(pair(f"{joint}img_attn.proj", 4096, 4096), told) == "FLUX.2 klein 9B"
    assert refusal(pair("transformer.transformer_blocks.0.attn.to_q", 3072, 3072), told) is None


def test_a_file_of_diffusers_script_is_said_to_be_of_the_wrong_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """train_dreambooth_lora_flux2_klein.py asks for the last layers of 24 parallel blocks; klein 4B has 20."""
    out = [f"single_transformer_blocks.{number}.attn.to_out" for number in range(24)]
    common = ["to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj"]
    tensors = pair("transformer.single_transformer_blocks.0.attn.to_out", 12288, 3072)
    for targets, warned in ((common + out, True), (common + out[:20], False)):
        settings = {"transformer.r": 2, "transformer.lora_alpha": 2, "transformer.target_modules": targets}
        save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": json.dumps(settings)})
        assert ("reads layers 10, 20 and 30" in str(describe(tmp_path / "x.safetensors")["caution"])) == warned
        read_lora(tmp_path / "x.safetensors")
        assert ("x.safetensors seems to be from diffusers' training script" in capsys.readouterr().out) == warned
        assert main(["inspect", str(tmp_path / "x.safetensors")]) == 0
        assert ("caution    seems to be from" in capsys.readouterr().out) == warned


def sum_of(file: Path) -> dict[str, Tensor]:
    return {layer: update.delta() for layer, update in read_lora(file).items()}


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_lora(updates(IN_BLOCKS), tmp_path / "lora.safetensors", names=NAMES)


@pytest.mark.parametrize("layout", ["kohya", "comfy", "diffusers"])
def test_export_and_mix(layout: str, lora: Path, tmp_path: Path) -> None:
    def run(*words: object) -> None:
        assert main([str(word) for word in words]) == 0

    other, mixed = tmp_path / "other.safetensors", tmp_path / "mixed.safetensors"
    run("export", lora, "--format", layout, "--out", other)
    assert_same(sum_of(other), updates(IN_BLOCKS))
    run("mix", f"{lora}:0.25", f"{other}:0.75", "--out", mixed)
    assert_same(sum_of(mixed), updates(IN_BLOCKS))
    assert_same(in_diffusers(mixed), updates(IN_BLOCKS))
    assert open_lora(other).metadata["modelspec.architecture"] == "Flux.2-klein-4b/lora"
