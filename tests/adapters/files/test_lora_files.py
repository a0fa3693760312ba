"""LoRA files from one layout to another: names, scales and halves, against an independent reader and real key lists."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path

import lora_readers
import original_layout
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from simpletune.adapters.files.describe import describe, find_weight_file, format_description
from simpletune.adapters.files.header import ADAPTER_METADATA, open_lora
from simpletune.adapters.files.keys import layout_of
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import DoraUpdate, LohaUpdate, LokrUpdate, LoraUpdate, OftUpdate, fuse
from simpletune.adapters.files.write import file_tensors, in_original_names, write_lora
from simpletune.apps.cli.main import main
from simpletune.models.sd3.sd3_lora import LAYOUTS, NAMES
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.models.shared.fused import THIRDS, stacked
from simpletune.system.options import UserError

WRITTEN = {layout.name: layout for layout in LAYOUTS if layout.name in ("diffusers", "kohya", "comfy")}
KOHYA = WRITTEN["kohya"]
TINY = {
    "sample_size": 8, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 3, "attention_head_dim": 8,
    "num_attention_heads": 2, "joint_attention_dim": 24, "caption_projection_dim": 16, "pooled_projection_dim": 14,
    "pos_embed_max_size": 5,
}  # fmt: skip
DUAL = TINY | {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
KEYS = json.loads(
    gzip.decompress((Path(__file__).parents[2] / "support" / "assets" / "sd3_medium_keys.json.gz").read_bytes())
)


def linears(config: dict) -> dict[str, tuple[int, int]]:
    shapes = parameter_shapes(config)
    return {k.removesuffix(".weight"): v for k, v in shapes.items() if k.endswith(".weight") and len(v) == 2}  # type: ignore[misc]


def random_state(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {**parameter_shapes(config), "pos_embed.pos_embed": (1, 25, 16)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def random_updates(layers: list[str], config: dict, rank: int, scale: float, seed: int = 0) -> dict[str, LoraUpdate]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in layers:
        o, i = linears(config)[layer]
        down, up = torch.randn(rank, i, generator=generator), torch.randn(o, rank, generator=generator)
        found[layer] = LoraUpdate(down, up, scale)
    return found


def patched(state: dict[str, torch.Tensor], updates: dict[str, LoraUpdate]) -> dict[str, torch.Tensor]:
    """W + scale B A, by the definition."""
    return state | {f"{k}.weight": state[f"{k}.weight"] + u.scale * (u.up @ u.down) for k, u in updates.items()}


lora_cases = st.tuples(
    st.sampled_from([TINY, DUAL]),
    st.integers(1, 4),
    st.sampled_from([0.25, 1.0, 0.7, 3.0]),
    st.randoms(use_true_random=False),
)


@pytest.mark.parametrize("layout", WRITTEN)
@settings(max_examples=8, deadline=None)
@given(case=lora_cases)
def test_every_layout_is_read_again_and_changes_the_original_model_as_the_definition_says(
    layout: str, case: tuple, tmp_path_factory
) -> None:
    config, rank, scale, random = case
    names = sorted(linears(config))
    chosen = random.sample(names, random.randint(1, len(names)))
    updates = random_updates(chosen, config, rank, scale, random.randint(0, 99))
    file = write_lora(updates, tmp_path_factory.mktemp("lora") / "x.safetensors", layout)
    state = random_state(config)
    original = original_layout.mmdit(state, config["num_layers"])
    actual, unmatched = lora_readers.apply(original, load_file(file), config["num_layers"])
    assert unmatched == []
    for name, tensor in original_layout.mmdit(patched(state, updates), config["num_layers"]).items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    read = read_lora(file)
    assert set(read) == set(updates)
    for name, update in updates.items():
        torch.testing.assert_close(read[name].down, update.down, rtol=0, atol=0)
        torch.testing.assert_close(read[name].folded().up, update.folded().up, rtol=1e-6, atol=1e-6)


def test_the_alpha_of_a_fused_module_is_that_of_its_parts_together() -> None:
    updates = random_updates([f"transformer_blocks.0.attn.{n}" for n in ("to_q", "to_k", "to_v")], TINY, 4, 0.5)
    file = file_tensors(updates, KOHYA)
    module = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    assert file[f"{module}.lora_down.weight"].shape[0] == 12
    assert file[f"{module}.alpha"].item() == 0.5 * 12  # three times alpha of one, so that alpha / rank stays
    only_k = {"transformer_blocks.0.attn.to_k": updates["transformer_blocks.0.attn.to_k"]}
    file = file_tensors(only_k, KOHYA)
    up = file[f"{module}.lora_up.weight"]
    assert up.shape == (48, 4) and file[f"{module}.alpha"].item() == 2.0
    assert not up[:16].any() and up[16:32].any() and not up[32:].any()


def test_a_fused_update_that_shares_its_first_factor_stays_whole() -> None:
    torch.manual_seed(0)
    whole = LoraUpdate(torch.randn(4, 8), torch.randn(30, 4), 0.5)
    parts = whole.split(THIRDS)
    assert [part.rank for part in parts if part] == [4, 4, 4]
    torch.testing.assert_close(torch.cat([part.delta() for part in parts if part]), whole.delta(), rtol=0, atol=1e-6)
    again = fuse({rows: part for rows, part in reversed([*zip(THIRDS, parts, strict=True)]) if part})
    assert torch.equal(again.down, whole.down) and torch.equal(again.up, whole.up) and again.scale == 0.5


@pytest.mark.parametrize("layout", WRITTEN)
def test_a_file_that_was_trained_on_fused_layers_goes_to_every_layout(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = "lora_unet_joint_blocks_0_x_block_attn_qkv."
    down, up = torch.randn(4, 16), torch.randn(48, 4)
    tensors = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(2.0)}
    save_file({module + role: tensor for role, tensor in tensors.items()}, tmp_path / "x.safetensors")
    file = write_lora(read_lora(tmp_path / "x.safetensors"), tmp_path / "y.safetensors", layout)
    original = original_layout.mmdit(random_state(TINY), TINY["num_layers"])
    actual, unmatched = lora_readers.apply(original, load_file(file), TINY["num_layers"])
    name = "joint_blocks.0.x_block.attn.qkv.weight"
    torch.testing.assert_close(actual[name], original[name] + 0.5 * up @ down, rtol=1e-5, atol=1e-5)
    assert unmatched == []


@pytest.mark.parametrize("rank", [3, 4])
def test_an_untrained_part_and_an_untrained_whole_are_kept(rank: int) -> None:
    torch.manual_seed(0)
    parts = [LoraUpdate(torch.randn(rank, 8), torch.randn(10, rank)) for _ in range(3)]
    parts[0] = LoraUpdate(parts[0].down, torch.zeros(10, rank))
    back = fuse(dict(zip(THIRDS, parts, strict=True))).split(THIRDS)
    assert all(b is not None and torch.equal(b.down, p.down) for b, p in zip(back, parts, strict=True))
    empty = [LoraUpdate(part.down, torch.zeros_like(part.up)) for part in parts]
    assert None not in fuse(dict(zip(THIRDS, empty, strict=True))).split(THIRDS)


@pytest.mark.parametrize("heights", [(1, 1, 1), (1, 1, 1, 4), (4, 1, 1), (2, 3)])
@pytest.mark.parametrize("scales", [(1.0, 2.0, 0.5, 3.0), (0.7, None, 0.7, 0.7), (None, 2.0, None, None)])
def test_parts_of_different_heights_scales_and_ranks(heights: tuple, scales: tuple) -> None:
    torch.manual_seed(0)
    spans = stacked(*heights)
    parts = [s and LoraUpdate(torch.randn(n + 1, 8), torch.randn(6 * h, n + 1), s) for n, (h, s) in
             enumerate(zip(heights, scales, strict=False))]  # fmt: skip
    fused = fuse({rows: part for rows, part in reversed([*zip(spans, parts, strict=True)]) if part})
    expected = [
        part.delta() if part else torch.zeros(6 * height, 8) for part, height in zip(parts, heights, strict=True)
    ]
    torch.testing.assert_close(fused.delta(), torch.cat(expected), rtol=1e-6, atol=1e-6)
    assert fused.rank == sum(part.rank for part in parts if part)
    for back, part in zip(fused.split(spans), parts, strict=True):
        assert (back is None) == (part is None)
        if part is not None and back is not None:
            torch.testing.assert_close(back.delta(), part.delta(), rtol=1e-6, atol=1e-6)
            assert back.rank == part.rank


def test_alpha_grows_with_the_rank_of_what_is_fused() -> None:
    """As musubi's and sd-scripts' converters have it: three ranks stacked, three times alpha."""
    parts = {rows: LoraUpdate(torch.randn(4, 8), torch.randn(6, 4), 2.0 / 4) for rows in THIRDS}
    factors, alpha = fuse(parts).file_factors()
    assert alpha == 6.0 and [tuple(factor.shape) for factor in factors.values()] == [(12, 8), (18, 12)]


def test_every_kind_of_update_of_a_fused_layer_is_split_exactly() -> None:
    torch.manual_seed(0)
    spans = stacked(1, 1, 4)
    lora = LoraUpdate(torch.randn(3, 8), torch.randn(12, 3), 0.5)
    lokr = LokrUpdate({"lokr_w1": torch.randn(4, 2), "lokr_w2": torch.randn(3, 4)}, 12, 0.5)
    loha = LohaUpdate(
        {f"hada_w{n}_{s}": torch.randn(*shape) for n in "12" for s, shape in (("a", (12, 2)), ("b", (2, 8)))}
    )
    dora, oft = DoraUpdate(lora, torch.rand(12) + 1), OftUpdate(torch.randn(6, 2, 2))
    weight = torch.randn(12, 8)
    for update in (lora, lokr, loha, dora, oft):
        pieces = [weight[rows.within(12)] for rows in spans]
        found = [part.delta_for(piece) for part, piece in zip(update.split(spans), pieces, strict=True) if part]
        assert [len(each) for each in found] == [2, 2, 8]
        torch.testing.assert_close(torch.cat(found), update.delta_for(weight), rtol=1e-6, atol=1e-6)


def test_parts_that_cannot_be_of_one_layer_are_refused() -> None:
    parts = [LoraUpdate(torch.randn(2, 8), torch.randn(height, 2)) for height in (6, 6, 5)]
    with pytest.raises(UserError, match="are one in the original layout have updates of sizes 6 x 8, 6 x 8, 5 x 8"):
        fuse(dict(zip(THIRDS, parts, strict=True)))
    with pytest.raises(
        UserError, match=r"attn.to_q is a part of joint_blocks.0.x_block.attn.qkv in the layout kohya.*--rank"
    ):
        KOHYA.module("transformer_blocks.0.attn.to_q")


@pytest.mark.parametrize("layout", WRITTEN)
def test_exported_keys_match_sd3_mediums_own(layout: str) -> None:
    """Every linear layer of SD3 Medium, none left over, none unmatched."""
    config = SD3().files.known_config()
    updates = {name: LoraUpdate(torch.zeros(1, i), torch.zeros(o, 1)) for name, (o, i) in linears(config).items()}
    real = KEYS["diffusers" if layout == "diffusers" else "original"]
    chosen = WRITTEN[layout]
    named = updates if layout == "diffusers" else in_original_names(updates, NAMES)
    assert set(named) < {key.removesuffix(".weight") for key in real}
    biases = {key.removesuffix(".bias") for key in real if key.endswith(".bias")}
    # Every linear layer of SD3 has a bias, and nothing else but the patch convolution.
    assert set(named) == biases - {"pos_embed.proj", "x_embedder.proj"}
    state = {key: torch.empty(0) for key in KEYS["original"]}
    known = lora_readers.targets(state, config["num_layers"])
    modules = {chosen.key(name, "down").removesuffix("." + chosen.down) for name in named}
    assert modules <= set(known)
    assert {layer for module in modules for layer in chosen.layers(module)} == set(updates)


def test_the_real_key_lists_are_those_of_the_data(real_data: Path) -> None:
    folder = real_data / "sd3_keys"
    original = (folder / "sd3_medium_mmdit_singlefile_keys.txt").read_text().split()
    assert KEYS["original"] == [key.removeprefix("model.diffusion_model.") for key in original]
    assert KEYS["diffusers"] == (folder / "sd3_medium_transformer_diffusers_keys.txt").read_text().split()
    assert {*parameter_shapes(SD3().files.known_config()), "pos_embed.pos_embed"} == set(KEYS["diffusers"])


def renamed(tensors: dict[str, torch.Tensor], prefix: str, underscores: bool = False) -> dict[str, torch.Tensor]:
    found = {}
    for key, tensor in tensors.items():
        module, _, role = key.removeprefix("transformer.").rpartition(".lora_")
        module = module.replace(".", "_") if underscores else module
        role = {"A.weight": "down.weight", "B.weight": "up.weight"}[role] if underscores else role
        found[f"{prefix}{module}.lora_{role}"] = tensor
    return found


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("peft", lambda t: renamed(t, "base_model.model.")),
        ("onetrainer", lambda t: renamed(t, "lora_transformer_", underscores=True)),
        ("bare", lambda t: renamed(t, "")),
    ],
)
def test_other_layouts_are_read_too(name: str, change, tmp_path: Path) -> None:
    updates = random_updates(sorted(linears(DUAL)), DUAL, 2, 1.0)
    save_file(change(file_tensors(updates, WRITTEN["diffusers"])), tmp_path / "x.safetensors")
    header = open_lora(tmp_path / "x.safetensors")
    assert header.layout and header.layout.name == name
    read = read_lora(tmp_path / "x.safetensors")
    assert set(read) == set(updates)
    assert all(torch.equal(read[layer].up, updates[layer].up) for layer in updates)


def test_alpha_where_each_reader_looks_for_it(tmp_path: Path) -> None:
    updates = random_updates(["transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2"], TINY, 4, 1.0)
    tensors = file_tensors(updates, WRITTEN["diffusers"])
    settings_ = {"transformer.r": 4, "transformer.lora_alpha": 8,
                 "transformer.alpha_pattern": {"transformer_blocks.1.ff.net.2": 2}}  # fmt: skip
    save_file(tensors, tmp_path / "header.safetensors", {"lora_adapter_metadata": json.dumps(settings_)})
    read = read_lora(tmp_path / "header.safetensors")
    assert [read[layer].scale for layer in sorted(read)] == [2.0, 0.5]
    tools = {tool["tool"]: tool for tool in describe(tmp_path / "header.safetensors")["tools"]}
    assert tools["ComfyUI"]["notes"] == [
        "applies it at scale 1 instead of 0.5, 2, because it ignores alpha in the header"
    ]
    with_alpha = tensors | {"transformer.transformer_blocks.0.attn.to_q.alpha": torch.tensor(1.0, dtype=torch.bfloat16)}
    save_file(with_alpha, tmp_path / "tensor.safetensors")
    assert read_lora(tmp_path / "tensor.safetensors")["transformer_blocks.0.attn.to_q"].scale == 0.25
    tools = {tool["tool"]: tool for tool in describe(tmp_path / "tensor.safetensors")["tools"]}
    assert tools["diffusers"]["loads"] == "refuses" and tools["ComfyUI"]["loads"] == "yes"


def test_ranks_that_differ_keep_their_scales_in_diffusers(tmp_path: Path) -> None:
    updates = random_updates(["transformer_blocks.0.attn.to_q"], TINY, 2, 1.0)
    updates |= random_updates(["transformer_blocks.1.attn.to_q", "transformer_blocks.2.attn.to_q"], TINY, 4, 1.0)
    file = write_lora(updates, tmp_path / "x.safetensors")
    with safe_open(file, framework="pt") as handle:
        header = json.loads(handle.metadata()["lora_adapter_metadata"])
    assert header["transformer.r"] == 4 and header["transformer.alpha_pattern"] == header["transformer.rank_pattern"]
    assert header["transformer.rank_pattern"] == {"^transformer_blocks.0.attn.to_q": 2}
    assert {update.scale for update in read_lora(file).values()} == {1.0}


def sd3_file(folder: Path, **changes: torch.Tensor | None) -> Path:
    """A sound kohya file of one fused module, with tensors replaced or left out."""
    module = "lora_unet_joint_blocks_0_x_block_attn_qkv."
    tensors: dict[str, torch.Tensor | None] = {
        f"{module}lora_down.weight": torch.ones(2, 1536), f"{module}lora_up.weight": torch.ones(4608, 2),
        f"{module}alpha": torch.tensor(2.0),
    }  # fmt: skip
    tensors |= changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "x.safetensors")
    return folder / "x.safetensors"


def pair(module: str, inputs: int, outputs: int, names: str = "lora_down lora_up") -> dict[str, torch.Tensor]:
    down, up = names.split()
    return {f"{module}.{down}.weight": torch.ones(2, inputs), f"{module}.{up}.weight": torch.ones(outputs, 2)}


FOREIGN = {
    "Stable Diffusion 1.5": pair("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 768, 320),
    "Stable Diffusion 2": pair("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 1024, 320),
    "Stable Diffusion XL": pair("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 2048, 640),
    "Flux.1 or FLUX.2 klein 4B": pair("lora_unet_double_blocks_0_img_attn_qkv", 3072, 9216),
    "Flux.1": pair("lora_unet_double_blocks_0_img_attn_qkv", 3072, 9216)
    | pair("lora_unet_single_blocks_0_linear2", 15360, 3072),
    "Flux.1 ": pair("transformer.single_transformer_blocks.0.proj_mlp", 3072, 12288, "lora_A lora_B"),
    "FLUX.2 klein 4B": pair("diffusion_model.double_blocks.0.img_attn.qkv", 3072, 9216, "lora_A lora_B")
    | pair("diffusion_model.single_blocks.0.linear2", 12288, 3072, "lora_A lora_B"),
    "FLUX.2 klein 4B ": pair(
        "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj", 3072, 27648, "lora_A lora_B"
    )
    | pair("transformer.transformer_blocks.0.attn.to_q", 3072, 3072, "lora_A lora_B"),
    "FLUX.2 klein 9B": pair("transformer.single_transformer_blocks.0.attn.to_out", 16384, 4096, "lora_A lora_B"),
    "FLUX.2 dev": pair("lora_unet_double_blocks_0_img_attn_qkv", 6144, 18432),
    "Qwen-Image": pair("diffusion_model.transformer_blocks.0.img_mlp.net.0.proj", 3072, 12288, "lora_A lora_B"),
    "Qwen-Image-2.1": pair("transformer.transformer_blocks.0.img_mlp.gate_layer", 3072, 8192, "lora_A lora_B"),
    "Flux.1, FLUX.2 klein 4B or Qwen-Image": pair(
        "transformer.transformer_blocks.0.attn.to_q", 3072, 3072, "lora_A lora_B"
    ),
    "Z-Image": pair("diffusion_model.layers.3.attention.to_q", 3840, 3840, "lora_A lora_B")
    | pair("diffusion_model.noise_refiner.0.attention.to_q", 3840, 3840, "lora_A lora_B"),
    "Z-Image ": pair("lora_unet_layers_0_attention_qkv", 3840, 11520),
    "Lumina 2": pair("lora_unet_layers_0_attention_qkv", 2304, 3840),
    "Z-Image  ": pair("lora_unet_layers_0_feed_forward_w2", 10240, 3840),
    "Z-Image or Lumina 2": pair("lora_unet_layers_0_feed_forward_w2", 9216, 2304),
    "AuraFlow": pair("lora_unet_double_layers_0_attn_w1q", 3072, 3072),
    "Stable Diffusion XL ": pair("lora_te2_text_model_encoder_layers_0_mlp_fc1", 1280, 5120)
    | pair("lora_unet_down_blocks_1_attentions_0_proj_in", 640, 640),
    "a U-Net": pair("lora_unet_down_blocks_1_attentions_0_proj_in", 640, 640),
    # As kohya's scripts name them; each key alone tells.
    "Stable Diffusion XL  ": pair("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", 640, 640),
    "Stable Diffusion XL   ": pair("lora_te1_text_model_encoder_layers_0_mlp_fc1", 768, 3072)
    | pair("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q", 640, 640),
    "Stable Diffusion XL    ": pair("lora_unet_mid_block_attentions_0_transformer_blocks_9_attn1_to_q", 9, 9),
    "Stable Diffusion 1.5 or 2": pair("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", 320, 320),
    "Stable Diffusion 1.5 ": pair("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", 320, 320)
    | pair("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_v", 768, 1280),
    "PixArt or LTX": pair("transformer.transformer_blocks.0.attn1.to_q", 1152, 1152, "lora_A lora_B"),
    "Wan": pair("diffusion_model.blocks.0.self_attn.q", 1536, 1536, "lora_A lora_B"),
}


UNETS = ("Stable Diffusion 1.5", "Stable Diffusion 2", "Stable Diffusion 1.5 or 2", "Stable Diffusion XL", "a U-Net")
KNOWN = (*UNETS, "FLUX.2 klein 4B", "Z-Image", "Qwen-Image")


@pytest.mark.parametrize("family", FOREIGN)
def test_a_lora_of_our_models_is_read_and_one_of_another_refused_by_its_name(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tools = tmp_path / "x.safetensors", ("diffusers", "ComfyUI", "Forge", "simpletune")
    save_file(FOREIGN[family], file)
    about = describe(file)
    assert about["family"].startswith(family.strip())
    if family.strip() in KNOWN:
        fused = 2 * any("qkv." in name for name in FOREIGN[family])  # is read as three layers
        assert len(read_lora(file)) * 2 == len(FOREIGN[family]) + 2 * fused
        reads = dict.fromkeys(tools, "yes") | ({} if family.strip() in UNETS else {"Forge": "refuses"})
        assert {tool["tool"]: tool["loads"] for tool in about["tools"]} == reads
    else:
        with pytest.raises(
            UserError, match=f"is a LoRA for {re.escape(family.strip())} .*Give one for Stable Diffusion 3, Stable"
        ):
            read_lora(file)
    assert main(["inspect", str(file)]) == (0 if family.strip() in KNOWN else 2)
    said = capsys.readouterr()
    assert family.strip() in said.out and ("is a LoRA for" in said.err) == (family.strip() not in KNOWN)


def test_a_header_of_too_many_tensors_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = '"a{}.lora_A.weight":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    entries = ",".join(map(entry.format, range(10**5 + 1)))
    (tmp_path / "x.safetensors").write_bytes((len(entries) + 2).to_bytes(8, "little") + f"{{{entries}}}".encode())
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(UserError, match="has 100,001 tensors; the limit is 100,000"):
        describe(tmp_path / "x.safetensors")


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), float("-inf"), 1e38, -1e38])
def test_a_scale_that_no_training_gives_is_refused(alpha: float, tmp_path: Path) -> None:
    file = sd3_file(tmp_path, **{"lora_unet_joint_blocks_0_x_block_attn_qkv.alpha": torch.tensor(alpha)})
    with pytest.raises(UserError, match=re.escape(f"attn_qkv.alpha gives a scale of {alpha / 2:g}.")):
        read_lora(file)
    assert "refuses" in format_description(describe(file))


SHAPES = [(), (0,), (4,), (4, 0), (0, 4), (2, 1536), (4608, 2), (2, 2, 1, 1)]


@pytest.mark.parametrize("down", SHAPES, ids=str)
def test_factors_of_any_shape_are_described_and_refused_in_words(down: tuple[int, ...], tmp_path: Path) -> None:
    for up in SHAPES:
        for module in ("lora_unet_joint_blocks_0_x_block_attn_qkv", "lora_unet_down_blocks_0_x_attn2_to_k"):
            tensors = {f"{module}.lora_down.weight": torch.ones(down), f"{module}.lora_up.weight": torch.ones(up)}
            save_file(tensors | {f"{module}.alpha": torch.tensor(1.0)}, tmp_path / "x.safetensors")
            assert "x.safetensors" in format_description(describe(tmp_path / "x.safetensors"))
            if module.endswith("qkv") and (down, up) == ((2, 1536), (4608, 2)):
                continue
            with pytest.raises(UserError):
                read_lora(tmp_path / "x.safetensors")


def test_what_would_steer_a_terminal_is_shown_and_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steering = "\x1b]0;owned\x07\x1b[2J\u202e"
    save_file({f"{steering}.lora_down.weight": torch.ones(2, 2), f"{steering}.lora_up.weight": torch.ones(2, 2)},
              tmp_path / "x.safetensors", {steering: steering})  # fmt: skip
    for words in (["inspect"], ["export", "--format", "kohya"]):
        assert main([words[0], str(tmp_path / "x.safetensors"), *words[1:]]) == 2
        printed = "".join(capsys.readouterr())
        assert r"\x1b]0;owned\x07" in printed and r"\u202e" in printed
        assert not set(printed) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize(
    ("family", "tensors"),
    [
        ("Stable Diffusion 3 Medium", pair("lora_unet_joint_blocks_0_x_block_attn_qkv", 1536, 4608)),
        ("Stable Diffusion 3.5 Large", pair("lora_unet_joint_blocks_0_x_block_attn_qkv", 2432, 7296)),
        ("Stable Diffusion 3.5 Medium", pair("lora_unet_joint_blocks_0_x_block_attn2_qkv", 1536, 4608)),
        ("Stable Diffusion 3.5 Medium", pair("lora_unet_joint_blocks_0_x_block_adaLN_modulation_1", 1536, 13824)),
    ],
)
def test_the_sd3s_are_told_apart(family: str, tensors: dict, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    assert describe(tmp_path / "x.safetensors")["family"] == family


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": None}, "qkv lacks one of its factors"),
        ({"lora_unet_joint_blocks_0_x_block_mlp_fc3.lora_up.weight": torch.ones(2, 2)}, "1 of 4 keys match no .*fc3"),
        ({"something.else": torch.ones(1)}, "1 of 4 keys match no layer of Stable Diffusion 3: something.else"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.dora_scale": torch.ones(1, 1536)}, "is DoRA with a magn"),
        ({"lora_unet_joint_blocks_0_x_block_mlp_fc1.hada_w1_a": torch.ones(4, 2)}, "fc1 lacks one of its factors"),
        ({"lora_unet_joint_blocks_0_x_block_mlp_fc1.lokr_w1": torch.ones(4, 4)}, "fc1 lacks one of its factors"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.ones(4608, 3)}, "do not match"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.ones(4607, 2)}, "do not match"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.alpha": torch.ones(2)}, "must be a single number"),
        ({"transformer.proj_out.lora_A.weight": torch.ones(2, 2)}, "mixes layouts"),
        ({"lora_unet_x_embedder_proj.lora_down.weight": torch.ones(1, 16, 2, 2),
          "lora_unet_x_embedder_proj.lora_up.weight": torch.ones(1536, 1, 1, 1)},
         "x_embedder_proj updates a 2x2 convolution, which is not supported"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.full((4608, 2), torch.nan)}, "NaN or"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.ones(4608, 2).char()}, "not supported"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": torch.ones(2, 1536, 1)}, "must be matrices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_damaged_and_strange_files_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    file = sd3_file(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        read_lora(file)
    assert describe(file)["kind"] == "lora"  # and inspect says what it is all the same


@pytest.mark.parametrize(("rank", "inputs", "outputs", "message"), [
    (100_000, 1536, 4608, "rank 100,000 for 1,536 inputs and 4,608 outputs.*no update a higher rank"),
    (5_000, 1536, 4608, "rank 5,000 for 1,536 inputs and 4,608 outputs.*no update a higher rank"),
    (4, 10**9, 4608, "rank 4 for 1,000,000,000 inputs and 4,608 outputs. No layer has more than 32,768"),
    (4, 1536, 3 * 10**8, "rank 4 for 1,536 inputs and 300,000,000 outputs. No layer has more than 32,768"),
    (10**8, 1536, 4608, "has 2,457,600,000,000 bytes of tensors; a LoRA has at most 34,359,738,368"),
])  # fmt: skip
def test_sizes_that_no_layer_has_are_refused_before_anything_is_read(
    rank: int, inputs: int, outputs: int, message: str, tmp_path: Path
) -> None:
    """A sparse file of any size takes no room on a disk."""
    name, file, place, entries = "lora_unet_joint_blocks_0_x_block_attn_qkv", tmp_path / "x.safetensors", 0, {}
    for role, shape in (("down", [rank, inputs]), ("up", [outputs, rank])):
        end = place + 4 * shape[0] * shape[1]
        entries[f"{name}.lora_{role}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries).encode()
    with file.open("wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        handle.truncate(8 + len(header) + place)
    started = time.process_time()
    with pytest.raises(UserError, match=message):
        read_lora(file)
    assert time.process_time() - started < 1


def test_updates_of_text_encoders_are_read_beside_the_denoiser_s_and_alone(tmp_path: Path) -> None:
    text = pair("lora_te1_text_model_encoder_layers_0_mlp_fc1", 768, 3072)
    plain, file = read_lora(sd3_file(tmp_path)), sd3_file(tmp_path, **text)
    layer = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    assert set(read_lora(file)) == {*plain, layer} and len(plain) == 3
    assert "text       1 layer of CLIP-L" in format_description(describe(file))
    save_file(text, file)
    assert set(read_lora(file)) == {layer}
    about = format_description(describe(file))
    assert "for        text encoders alone (CLIP-L)" in about
    assert "what       LoRA, kohya (text encoders), 7,680 parameters" in about
    module = next(iter(text)).partition(".")[0]
    save_file({f"{module}.lokr_w1": torch.ones(48, 24), f"{module}.lokr_w2": torch.ones(64, 32)}, file)
    assert "what       LoKr, " in format_description(describe(file))


def test_files_that_are_no_lora(tmp_path: Path) -> None:
    save_file({}, tmp_path / "empty.safetensors")
    save_file({"joint_blocks.0.x_block.attn.qkv.weight": torch.ones(3, 1)}, tmp_path / "model.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(sd3_file(tmp_path).read_bytes()[:-100])
    (tmp_path / "noise.safetensors").write_bytes(b"<html>not found</html>")
    (tmp_path / "x.gguf").write_bytes(b"GGUF and more")
    for read, name, words in (
        (read_lora, "empty.safetensors", "empty.safetensors is empty"),
        (read_lora, "model.safetensors", "is Stable Diffusion 3, in the original layout. Give a LoRA"),
        (describe, "cut.safetensors", "truncated"),
        (describe, "noise.safetensors", "not a safetensors file"),
        (describe, "empty.safetensors", "empty.safetensors is empty"),
        (describe, "x.gguf", "x.gguf is a GGUF file.*Get the .safetensors version"),
        (describe, "nothing.safetensors", "nothing.safetensors does not exist. Give a .safetensors file"),
    ):
        with pytest.raises(UserError, match=words):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "lora_adapter_metadata in its header is not JSON. The file is damaged"),
        ('{"transformer.use_dora": true}', "is DoRA according to its header, but lacks its magnitudes. The file"),
        ('{"transformer.alpha_pattern": {"(": 3}, "transformer.r": 2}', r"pattern '\(' in a .* settings is invalid"),
        *(
            (json.dumps({"r": 2, "lora_alpha": 2, "rank_pattern": {pattern: 4}}), "could take forever")
            for pattern in ("(a+)+$", "(.*)*x", ".*" * 5 + "x", "a" * 201)
        ),
    ],
)
def test_settings_in_a_header_that_cannot_be_used(settings: str, message: str, tmp_path: Path) -> None:
    tensors = pair("transformer.transformer_blocks.0.attn.to_q", 1536, 1536, "lora_A lora_B")
    save_file(tensors, tmp_path / "x.safetensors", {ADAPTER_METADATA: settings})
    with pytest.raises(UserError, match=message):
        read_lora(tmp_path / "x.safetensors")


def test_settings_beside_a_peft_file(tmp_path: Path) -> None:
    file, beside = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    save_file(pair("base_model.model.transformer_blocks.0.attn.to_q", 1536, 1536, "lora_A lora_B"), file)
    beside.write_text('{"r": 2, "lora_alpha": 6}')
    assert {update.scale for update in read_lora(file).values()} == {3.0}
    beside.write_text("{")
    with pytest.raises(UserError, match="adapter_config.json is not JSON. The file is damaged"):
        read_lora(file)


class Alarm:
    """Unpickling this writes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["x.pt", "x.ckpt", "x.bin", "renamed.safetensors"])
def test_pickle_files_are_never_opened(name: str, tmp_path: Path) -> None:
    torch.save({"lora": Alarm(tmp_path / "alarm")}, tmp_path / name)
    for read in (read_lora, describe):
        with pytest.raises(UserError, match="is a pickle file .* never opened"):
            read(tmp_path / name)
    assert not (tmp_path / "alarm").exists()


def test_inspect_in_words(tmp_path: Path) -> None:
    up = torch.ones(4608, 2)
    up[3, 1], up[4, 0] = torch.nan, torch.inf
    file = sd3_file(tmp_path, **{"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": up.bfloat16()})
    text = format_description(describe(file))
    for line in ("LoRA, kohya (lora_unet_*)", "Stable Diffusion 3 Medium (attention of width 1536", "in tensors: 2",
                 "diffusers  silently nothing", "ComfyUI    yes", "Forge      yes", "lora_up.weight: 2 values are NaN",
                 "simpletune refuses; values are NaN", "NaN spreads through the model",
                 "3 in 1 modules: attn.to_k (1), attn.to_q (1), attn.to_v (1)"):  # fmt: skip
        assert line in text
    assert "not_finite" not in describe(file, values=False)
    zeros = sd3_file(tmp_path, **{"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.zeros(4608, 2)})
    assert "1 of 1 modules are zero: untrained" in format_description(describe(zeros))
    assert describe(sd3_file(tmp_path))["not_finite"] == {}


def test_inspect_finds_the_result_of_a_full_run(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "samples.safetensors").touch()
    save_file(pair("x", 4, 4), file := tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    assert find_weight_file(tmp_path) == file


def test_a_layout_is_that_of_all_keys() -> None:
    assert layout_of(["lora_unet_x"]) is KOHYA and layout_of(["lora_unet_x", "transformer.y"]) is not KOHYA


def test_inspect_of_a_model_in_words(tmp_path: Path) -> None:
    names = ["joint_blocks.23.x_block.attn.qkv.weight", "joint_blocks.2.x_block.attn.qkv.weight"]
    names += ["first_stage_model.x", "text_encoders.t5xxl.x"]
    metadata = {"modelspec.title": "a title " * 20}
    file = tmp_path / "model.safetensors"
    save_file({f"model.diffusion_model.{n}" if "joint" in n else n: torch.ones(1) for n in names}, file, metadata)
    about = describe(file)
    assert (about["kind"], about["blocks"], about["with"]) == ("model", 24, ["autoencoder", "T5"])
    text = format_description(about)
    for line in ("what       Stable Diffusion 3", "blocks     24", "with       autoencoder, T5", "4 tensors (F32)",
                 "metadata   modelspec.title: a title a title", "... (160 characters)"):  # fmt: skip
        assert line in text
    save_file({"something": torch.ones(1, dtype=torch.int64)}, file)
    assert "what       unknown\nkeys       something" in format_description(describe(file))


def test_what_other_tools_make_of_it(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"

    def said(tensors: dict) -> dict[str, str]:
        save_file(tensors, file)
        return {tool["tool"]: "; ".join([tool["loads"], *tool["notes"]]) for tool in describe(file)["tools"]}

    block = "transformer_blocks.0.attn."
    ranks = pair(f"transformer.{block}to_q", 1536, 1536, "lora_A lora_B")
    ranks |= {f"transformer.{block}to_k.lora_A.weight": torch.ones(3, 1536),
              f"transformer.{block}to_k.lora_B.weight": torch.ones(1536, 3)}  # fmt: skip
    assert "ranks differ: versions that use the first layer's rank" in said(ranks)["diffusers"]
    assert said(pair(f"{block}to_q", 1536, 1536, "lora_A lora_B"))["ComfyUI"].startswith("silently nothing; names with")
    comfy = file_tensors(random_updates(["transformer_blocks.0.attn.to_q"], TINY, 2, 1.0), WRITTEN["comfy"])
    assert said(comfy | pair("diffusion_model.joint_blocks.0.x_block.mlp.fc1", 16, 64))["Forge"].startswith(
        "yes; according to its source"
    )
    with pytest.raises(UserError, match="nothing.safetensors: there are no updates"):
        write_lora({}, tmp_path / "nothing.safetensors")
    large = {"transformer_blocks.0.attn.to_q": LoraUpdate(torch.full((1, 8), 1e38), torch.ones(8, 1), 1.0)}
    with pytest.raises(UserError, match="lora_A.weight overflows fp16.*--dtype bf16"):
        write_lora(large, tmp_path / "large.safetensors", dtype="fp16")
    with pytest.raises(UserError, match="conv is not a layer of Stable Diffusion 3"):
        in_original_names({"conv": large["transformer_blocks.0.attn.to_q"]}, NAMES)
