"""klein's single files against diffusers' converter, and the models of FLUX.2 that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.models.families import family_of, likely_family
from simpletune.models.flux2.flux2_files import KLEIN, LAYOUT, OTHERS, bundled_configs, origins
from simpletune.models.flux2.flux2_option import Klein
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.models.shared.single_file import OriginalReader, open_file
from simpletune.system.options import UserError

SIZES: dict[str, Any] = {
    "patch_size": 1, "in_channels": 128, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 48, "timestep_guidance_channels": 16, "mlp_ratio": 3.0,
    "axes_dims_rope": [4, 4, 4, 4], "rope_theta": 2000, "eps": 1e-6, "guidance_embeds": False,
}  # fmt: skip


def original_shapes(config: Any) -> dict[str, list[int]]:
    """Every original name once, with the height of all that it stacks."""
    shapes, found = shapes_of_class("Flux2Transformer2DModel", config), {}
    for name, origin in origins(config).items():
        height, *rest = shapes[name]
        found[origin.name] = [origin.rows.whole(height) if origin.rows else height, *rest]
    return found


def original(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A file's tensors, with random values."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=draw) for name, shape in original_shapes(config).items()}


IS_DISTILLED = "is the distilled FLUX.2 klein, which draws in 4 steps and without guidance, and loses that by training"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(original(SIZES), tmp_path / "flux-2-klein-base-4b.safetensors")
    return tmp_path / "flux-2-klein-base-4b.safetensors"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_single_file_is_read_as_by_diffusers(prefix: str, tmp_path: Path) -> None:
    tensors, file = original(SIZES), tmp_path / "a.safetensors"
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, file)
    wanted = convert_flux2_transformer_checkpoint_to_diffusers(dict(tensors))
    read = OriginalReader(file, LAYOUT)
    assert read.names == wanted.keys() == Flux2Transformer2DModel.from_config(SIZES).state_dict().keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(read.get(name), tensor, rtol=0, atol=0)


def test_the_sizes_are_those_of_its_shapes(file: Path, tmp_path: Path) -> None:
    """diffusers takes dev's for every file with these names."""
    config = open_file(file, LAYOUT).denoiser_config
    assert {name: config[name] for name in SIZES} == SIZES
    assert family_of(str(file)) == Klein()
    real = bundled_configs()["klein"]["transformer"]
    inferred = LAYOUT.infer(original_shapes(real))
    assert {name: inferred[name] for name in real} == dict(real)


def said(model: Klein) -> str:
    return "; ".join(f"{problem.path}: {problem.message}" for problem in model.files.problems())


def test_a_missing_part_is_named(file: Path) -> None:
    words = said(Klein(pretrained=str(file)))
    assert f"{file} contains no autoencoder (VAE). Set model.vae" in words
    assert "contains no Qwen3, tokenizers. Set model.text_encoders" in words and KLEIN in words
    assert "no autoencoder" not in said(Klein(pretrained=str(file), text_encoders=KLEIN))
    assert "contains no" not in said(Klein(transformer=str(file)))  # the others are those of pretrained


def test_another_model_of_flux_2_is_refused_by_name(tmp_path: Path) -> None:
    dev, nine = (OTHERS[width] for width in (15360, 12288))
    for name, why in (("FLUX.2-klein-base-9B", nine), ("FLUX.2-klein-9B", nine), ("FLUX.2-dev", dev)):
        source = f"black-forest-labs/{name}"
        assert said(Klein(pretrained=source)) == f"model.pretrained: {source} is, by its name, {why}"
        assert likely_family(source).family == "klein"
    assert "non-commercial" in nine and KLEIN in dev
    for change, why in (({"joint_attention_dim": 12288}, nine), ({"guidance_embeds": True}, dev)):
        config = SIZES | change
        tensors = {name: tensor for name, tensor in original(config | {"guidance_embeds": False}).items()}
        if config["guidance_embeds"]:
            tensors["guidance_in.in_layer.weight"] = torch.zeros(32, 16)
        save_file(tensors, tmp_path / "other.safetensors")
        with pytest.raises(UserError, match=f"other.safetensors: {why}"):
            _ = open_file(tmp_path / "other.safetensors", LAYOUT).denoiser_config
        folder = tmp_path / "transformer"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=why):
            Klein(pretrained=str(tmp_path)).files.known_config()


def test_the_distilled_model_is_trained_only_where_one_insists(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(json.dumps(SIZES))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinPipeline", "is_distilled": True}))
    distilled = file.with_name("flux-2-klein-4b.safetensors")
    file.rename(distilled)
    whole = Klein(pretrained=str(folder))
    for model in (Klein(pretrained="black-forest-labs/FLUX.2-klein-4B"), whole, Klein(transformer=str(distilled))):
        assert IS_DISTILLED in said(model)
        assert IS_DISTILLED not in said(model.model_copy(update={"distilled": True}))
    with pytest.raises(UserError, match="is the distilled FLUX.2 klein"):
        whole.files.fetch()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinPipeline"}))
    assert IS_DISTILLED not in said(whole)


@pytest.mark.parametrize(
    ("leaf", "tensor", "what"),
    [
        ("weight_scale", torch.ones(1), r"scaled fp8 \(double_blocks.0.img_mlp.0.weight_scale\)"),
        ("scale_weight", torch.ones(1), "scaled fp8"),
        ("weight_scale_2", torch.ones(1, dtype=torch.uint8), r"nvfp4 \(double_blocks.0.img_mlp.0.weight_scale_2\)"),
        ("comfy_quant", torch.ones(4, dtype=torch.uint8), "the type U8"),
    ],
)
def test_a_quantised_file_is_refused(leaf: str, tensor: Tensor, what: str, file: Path) -> None:
    save_file(load_file(file) | {f"double_blocks.0.img_mlp.0.{leaf}": tensor}, file)
    with pytest.raises(UserError, match=f"its transformer is in {what}.*Use the fp16 or bf16 file"):
        open_file(file, LAYOUT).check("transformer")


@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "GGUF"])
def test_quantised_weights_on_the_hub_are_refused_by_name(kind: str) -> None:
    name = f"someone/FLUX.2-klein-base-4b-{kind}"
    for field in ("pretrained", "transformer"):
        words = said(Klein.model_validate({field: name, "distilled": True}))
        assert words == (
            f"model.{field}: {name} is, by its name, in {kind}. Weights in fp8, nvfp4 or GGUF are not read. Use {KLEIN}"
        )


def test_gguf_is_refused(file: Path) -> None:
    other = file.with_suffix(".gguf")
    other.write_bytes(b"GGUF\3\0\0\0")
    words = said(Klein(transformer=str(other)))
    assert f"{other}" in words and "GGUF" in words


def test_a_lora_is_merged_into_a_file_and_into_a_folder(file: Path, tmp_path: Path) -> None:
    lora = write_lora(
        {
            "single_transformer_blocks.1.attn.to_out": LoraUpdate(torch.ones(2, 128), torch.ones(32, 2), 0.5),
            "norm_out.linear": LoraUpdate(torch.ones(1, 32), torch.arange(64.0)[:, None]),
            "transformer_blocks.0.attn.add_k_proj": LoraUpdate(torch.ones(2, 32), torch.ones(32, 2)),
        },
        tmp_path / "lora.safetensors",
    )
    out, folder = tmp_path / "out" / "merged.safetensors", tmp_path / "merged"
    for place in (out, folder):
        assert main(["merge", str(lora), "--base", str(file), "--out", str(place)]) == 0
    before, after = load_file(file), load_file(out)
    after = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in after.items()}
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if (after[name] != tensor).any()}
    qkv, norm_out = "double_blocks.0.txt_attn.qkv.weight", "final_layer.adaLN_modulation.1.weight"
    assert changed == {"single_blocks.1.linear2.weight", norm_out, qkv}
    torch.testing.assert_close(after[norm_out] - before[norm_out], torch.arange(64.0).roll(32)[:, None].expand(64, 32))
    torch.testing.assert_close((after[qkv] - before[qkv])[:, 0], torch.tensor([0.0, 2.0, 0.0]).repeat_interleave(32))
    model = Flux2Transformer2DModel.from_pretrained(folder, local_files_only=True)
    wanted = convert_flux2_transformer_checkpoint_to_diffusers(dict(after))
    torch.testing.assert_close(dict(model.state_dict()), wanted, rtol=0, atol=0)
