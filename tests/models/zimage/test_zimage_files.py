"""Z-Image's single files against diffusers' converter, and the models that are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletune.config.explain import _notes
from simpletune.config.load import validate
from simpletune.models.families import family_by_name, family_of
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.models.shared.single_file import OriginalReader, open_file
from simpletune.models.zimage.zimage_files import BASE, CLASS, LAYOUT, TURBO, UNUSED, bundled_configs, origins
from simpletune.models.zimage.zimage_option import ZImage
from simpletune.system.options import UserError

SIZES: dict[str, Any] = {
    "all_patch_size": [2], "all_f_patch_size": [1], "in_channels": 16, "dim": 48, "n_layers": 2,
    "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3, "norm_eps": 1e-5, "qk_norm": True, "cap_feat_dim": 32,
    "rope_theta": 256.0, "t_scale": 1000.0, "axes_dims": [4, 6, 6], "axes_lens": [1536, 512, 512],
}  # fmt: skip


def original_shapes(config: Any) -> dict[str, list[int]]:
    """Every original name once, with the height of all that it stacks."""
    shapes, found = shapes_of_class(CLASS, config), {}
    for name, origin in origins(config).items():
        height, *rest = shapes[name]
        found[origin.name] = [origin.rows.whole(height) if origin.rows else height, *rest]
    return found


def original(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A file's tensors, with random values."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=draw) for name, shape in original_shapes(config).items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(original(SIZES), tmp_path / "z_image_bf16.safetensors")
    return tmp_path / "z_image_bf16.safetensors"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_single_file_is_read_as_by_diffusers(prefix: str, tmp_path: Path) -> None:
    tensors, file = original(SIZES) | {UNUSED: torch.ones(48)}, tmp_path / "a.safetensors"
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, file)
    wanted = convert_z_image_transformer_checkpoint_to_diffusers(dict(tensors))
    read = OriginalReader(file, LAYOUT)
    assert read.names == wanted.keys() == ZImageTransformer2DModel.from_config(SIZES).state_dict().keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(read.get(name), tensor, rtol=0, atol=0)


def test_the_sizes_are_those_of_its_shapes(file: Path) -> None:
    config = open_file(file, LAYOUT).denoiser_config
    assert {name: config[name] for name in SIZES} == SIZES
    assert family_of(str(file)) == ZImage()
    real = bundled_configs()["base"]["transformer"]
    shapes = original_shapes(real)
    assert len(shapes) == 453 and len(shapes_of_class(CLASS, real)) == 521
    inferred = LAYOUT.infer(shapes)
    assert {name: inferred[name] for name in real} == dict(real)


def said(model: ZImage) -> str:
    return "; ".join(f"{problem.path}: {problem.message}" for problem in model.files.problems())


def test_a_missing_part_is_named(file: Path) -> None:
    words = said(ZImage(pretrained=str(file)))
    assert f"{file} contains no autoencoder (VAE). Set model.vae" in words
    assert "contains no Qwen3, tokenizers. Set model.text_encoders" in words and BASE in words
    assert "no autoencoder" not in said(ZImage(pretrained=str(file), text_encoders=BASE))
    assert "contains no" not in said(ZImage(transformer=str(file)))  # the others are those of pretrained


def test_the_shift_of_a_file_is_that_of_its_name(file: Path) -> None:
    """Nothing inside tells base from Turbo."""
    for name, shift in (("z_image_bf16", 6.0), ("z_image_turbo_bf16", 3.0), ("z_image_de_turbo", 6.0)):
        file = file.rename(file.with_name(f"{name}.safetensors"))
        model = ZImage(pretrained=str(file), text_encoders=BASE)
        assert model.files.part("scheduler").config()["shift"] == shift, name
    assert ZImage(pretrained=TURBO).files.scheduler_config()["shift"] == 3.0


def test_similar_models_are_refused_by_name(tmp_path: Path, file: Path) -> None:
    for name, what in (
        ("Tongyi-MAI/Z-Image-Omni-Base", "Z-Image-Omni"), ("Tongyi-MAI/Z-Image-Edit", "Z-Image-Edit"),
        ("alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union", "a ControlNet of Z-Image"),
        ("Alpha-VLLM/Lumina-Image-2.0", "Lumina 2"),
    ):  # fmt: skip
        words = said(ZImage(pretrained=name))
        assert words.startswith(f"model.pretrained: {name} is, by its name, {what}") and words.endswith(f"Use {BASE}")
    for name, family in ((BASE, True), (TURBO, True), ("z_image_turbo_bf16", True), ("stable-diffusion", False)):
        assert isinstance(family_by_name(name), ZImage) == family, name
    for more, what in (
        ("control_layers.0.adaLN_modulation.0.weight", "a ControlNet of Z-Image"),
        ("siglip_refiner.0.attention.qkv.weight", "Z-Image-Omni"),
        ("layers.0.adaLN_modulation.1.weight", "Lumina 2"),
    ):
        other = tmp_path / "other.safetensors"
        save_file(original(SIZES) | {more: torch.ones(4, 4)}, other)
        with pytest.raises(UserError, match=rf"by its tensor {more}\) is {what}.*Use {BASE}"):
            open_file(other, LAYOUT)
    folder = tmp_path / "omni"
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(json.dumps(SIZES | {"siglip_feat_dim": 1152}))
    with pytest.raises(UserError, match=f"{folder}: Z-Image-Omni, which reads reference pictures"):
        ZImage(pretrained=str(folder)).files.known_config()


@pytest.mark.parametrize(
    ("leaf", "tensor", "what"),
    [
        ("weight_scale", torch.ones(1), r"scaled fp8 \(layers.0.feed_forward.w1.weight_scale\)"),
        ("weight_scale_2", torch.ones(1, dtype=torch.uint8), r"nvfp4 \(layers.0.feed_forward.w1.weight_scale_2\)"),
        ("qweight", torch.ones(4, dtype=torch.int8), "the type I8"),
        ("comfy_quant", torch.ones(4, dtype=torch.uint8), "the type U8"),
    ],
)
def test_a_quantised_file_is_refused(leaf: str, tensor: Tensor, what: str, file: Path) -> None:
    save_file(load_file(file) | {f"layers.0.feed_forward.w1.{leaf}": tensor}, file)
    with pytest.raises(UserError, match=f"its transformer is in {what}.*Use the fp16 or bf16 file"):
        open_file(file, LAYOUT).check("transformer")


def test_scaled_int8_and_files_with_other_names_are_refused(file: Path) -> None:
    layer = "layers.0.feed_forward.w1.weight"
    whole = load_file(file)
    save_file(whole | {layer: whole[layer].to(torch.int8), f"{layer}_scale": torch.ones(1)}, file)
    with pytest.raises(UserError, match=f"scaled int8 .{layer}_scale"):
        open_file(file, LAYOUT).check("transformer")
    other = file.with_suffix(".gguf")
    other.write_bytes(b"GGUF\3\0\0\0")
    assert "GGUF" in said(ZImage(transformer=str(other)))
    save_file({"layers.0.attention.to_q.weight": torch.ones(3840, 3840, dtype=torch.bfloat16)}, file)
    with pytest.raises(UserError, match="It seems to be Z-Image, in diffusers' names: give the folder"):
        open_file(file, LAYOUT)


@pytest.mark.parametrize(
    ("family", "name", "drawn"),
    [
        ("zimage", TURBO, (8, 1.0)), ("zimage", "z_image_turbo_bf16", (8, 1.0)), ("zimage", BASE, (50, 5.0)),
        ("zimage", "ostris/Z-Image-De-Turbo", (50, 5.0)),
        ("sd3", "stabilityai/stable-diffusion-3.5-large-turbo", (4, 1.0)),
        ("sd3", "stabilityai/stable-diffusion-3.5-large", (20, 4.5)), ("sdxl", "stabilityai/sdxl-turbo", (4, 1.0)),
        ("sdxl", "sdxl_lightning_8step_unet", (8, 1.0)), ("sdxl", "realvisxl_v50_lightning", (4, 1.0)),
        ("sdxl", "tianweiy/DMD2", (4, 1.0)),
    ],
)  # fmt: skip
def test_a_base_that_draws_in_few_steps_is_told_by_its_name(family: str, name: str, drawn: tuple[int, float]) -> None:
    """Its pictures have its steps and guidance, unless one says otherwise."""
    data = {"name": "x", "model": {"family": family, "pretrained": name}, "data": {"path": "demo:pictures"}}
    read = validate(data, "x", needs_model=False)
    assert (read.validation.steps, read.validation.guidance) == drawn
    assert (read.model.few_steps is None) == (drawn[1] != 1.0)
    said = validate(data | {"validation": {"steps": 7}}, "x", needs_model=False)
    assert said.validation.steps == 7


def test_a_person_may_say_what_a_name_does_not(file: Path) -> None:
    def model(**changes: Any) -> Any:
        own = {"family": "zimage", "pretrained": str(file), "text_encoders": BASE, "vae": BASE, **changes}
        return validate({"name": "x", "model": own, "data": {"path": "demo:pictures"}}, "x", needs_model=False)

    turbo, base = model(turbo=True), model()
    assert (turbo.validation.steps, base.validation.steps) == (8, 50)
    assert turbo.model.files.part("scheduler").config()["shift"] == 3.0
    assert model(pretrained=TURBO, turbo=False).validation.steps == 50
    words = "Ordinary training undoes that: train the model that it was distilled from, or under model.loras=.training:"
    assert any(re.search(words, note) for note in _notes(turbo)) and not any("undoes" in note for note in _notes(base))
