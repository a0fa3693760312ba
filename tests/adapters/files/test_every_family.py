"""LoRA files of each family: layers outside the blocks, one text encoder alone, and what their headers say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.models.sd15.sd15_lora import NAMES as SD15_NAMES
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_lora import NAMES as SDXL_NAMES
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.unet.unet_lora import OUTER

WRITTEN = ("diffusers", "kohya", "comfy")
ORIGINAL = {
    "conv_in": "input_blocks_0_0", "conv_out": "out_2", "time_embedding.linear_1": "time_embed_0",
    "time_embedding.linear_2": "time_embed_2", "add_embedding.linear_1": "label_emb_0_0",
    "add_embedding.linear_2": "label_emb_0_2",
}  # fmt: skip
ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"


def random_update(shape: tuple[int, ...], seed: int) -> LoraUpdate:
    outputs, *inputs = shape
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(2, math.prod(inputs), generator=generator)
    return LoraUpdate(down, torch.randn(outputs, 2, generator=generator), 0.5, tuple(shape[2:]))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name, update in one.items():
        torch.testing.assert_close(other[name].delta(), update.delta(), rtol=0, atol=0)
        assert other[name].kernel == update.kernel


@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize(("family", "names"), [(SD15, SD15_NAMES), (SDXL, SDXL_NAMES)])
def test_layers_outside_the_blocks_are_written_and_read_in_every_layout(
    family: Any, names: Any, layout: str, tmp_path: Path
) -> None:
    """conv_in, conv_out and the embeddings of time and size, which other readers drop."""
    shapes = family().architecture.known_shapes()
    outer = [layer for layer in OUTER.values() if f"{layer}.weight" in shapes]
    assert len(outer) == (6 if family is SDXL else 4)
    updates = {layer: random_update(shapes[f"{layer}.weight"], seed) for seed, layer in enumerate((*outer, ATTENTION))}
    if family is SD15 and layout == "comfy":
        layout = "kohya"  # which ComfyUI reads
    file = write_lora(updates, tmp_path / "a.safetensors", layout, names=names)
    same(updates, read_lora(file))
    modules = {key.partition(".lora_")[0].removesuffix(".alpha") for key in load_file(file)}
    if layout == "kohya":
        spelt = {f"lora_unet_{ORIGINAL[each] if family is SDXL else each.replace('.', '_')}" for each in outer}
        assert spelt < modules
    assert main(["export", str(file), "--out", str(tmp_path / "b.safetensors"), "--format", "diffusers"]) == 0
    same(updates, read_lora(tmp_path / "b.safetensors"))


@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize(
    ("part", "kohya", "title"), [("text_encoder", "te1", "CLIP-L"), ("text_encoder_2", "te2", "CLIP-G")]
)
def test_a_lora_of_one_of_sdxls_text_encoders_alone_stays_that_encoder_s(
    layout: str, part: str, kohya: str, title: str, tmp_path: Path
) -> None:
    """Keys of the second begin like those of the first: text_encoder and text_encoder_2."""
    width = 768 if part == "text_encoder" else 1280
    updates = {
        f"{part}.text_model.encoder.layers.{layer}.{module}": random_update((width, width), layer)
        for layer in (0, 11)
        for module in ("self_attn.q_proj", "self_attn.out_proj")
    }
    file = write_lora(updates, tmp_path / "a.safetensors", layout, names=SDXL_NAMES)
    same(updates, read_lora(file))
    assert describe(file)["text_encoders"] == {title: 4}
    for other in WRITTEN:
        out = tmp_path / f"{other}.safetensors"
        assert main(["export", str(file), "--out", str(out), "--format", other]) == 0
        same(updates, read_lora(out))
        if other == "kohya":
            assert {key.partition("_text_model_")[0] for key in load_file(out)} == {f"lora_{kohya}"}
    half = tmp_path / "half.safetensors"
    assert main(["mix", f"{file}:0.25", f"{file}:0.25", "--out", str(half)]) == 0
    for name, update in read_lora(half).items():
        torch.testing.assert_close(update.delta(), 0.5 * updates[name].delta())


SAID: dict[str, tuple[tuple[int, int], dict[str, str]]] = {  # by which other tools recognise the base
    "sd15": ((1280, 768), {"modelspec.architecture": "stable-diffusion-v1/lora", "ss_base_model_version": "sd_v1",
                           "ss_v2": "False"}),
    "sd2": ((1280, 1024), {"ss_base_model_version": "sd_v2", "ss_v2": "True"}),  # of which there are two architectures
    "sdxl": ((1280, 2048), {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
                            "ss_base_model_version": "sdxl_base_v1-0", "ss_v2": "False"}),
    "sd3": ((1536, 1536), {"modelspec.architecture": "stable-diffusion-3-m/lora",
                           "ss_base_model_version": "sd3_m"}),
    "sd35": ((2432, 2432), {"modelspec.architecture": "stable-diffusion-3-5-large/lora",
                            "ss_base_model_version": "sd3_5-large"}),
}  # fmt: skip


@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize("family", SAID)
def test_the_header_names_the_model(family: str, layout: str, tmp_path: Path) -> None:
    shape, expected = SAID[family]
    layer = "transformer_blocks.0.attn.to_k" if family.startswith("sd3") else ATTENTION
    file = write_lora({layer: random_update(shape, 0)}, tmp_path / "a.safetensors")
    out = tmp_path / "b.safetensors"
    layout = "kohya" if family in ("sd15", "sd2") and layout == "comfy" else layout
    assert main(["export", str(file), "--out", str(out), "--format", layout]) == 0
    with safe_open(out, framework="pt") as handle:
        found = handle.metadata()
    fields = ("modelspec.architecture", "ss_base_model_version", "ss_v2")
    assert {key: found[key] for key in fields if key in found} == expected
    assert "modelspec.sai_model_spec" in found and found["ss_network_module"] in ("networks.lora", "networks.lora_sd3")
