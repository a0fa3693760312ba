"""Qwen-Image's single files, and the models with similar names or layers that are refused by what they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletune.config.load import validate
from simpletune.models.families import family_by_name, family_of, public_base
from simpletune.models.qwen_image.qwen_image_files import CLASS, FIRST, LAYOUT, NEWEST, bundled_configs
from simpletune.models.qwen_image.qwen_image_option import QwenImage
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.models.shared.single_file import OriginalReader, open_file
from simpletune.runs.model_card import licence
from simpletune.system.options import ConfigError, UserError


@pytest.fixture
def file(qwen: Path, tmp_path: Path) -> Path:
    """The tiny transformer as ComfyUI's file."""
    (source,) = (qwen / "transformer").glob("*.safetensors")
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(source).items()}
    save_file(tensors, tmp_path / "qwen_image_bf16.safetensors")
    return tmp_path / "qwen_image_bf16.safetensors"


def said(model: QwenImage) -> str:
    return "; ".join(f"{problem.path}: {problem.message}" for problem in model.files.problems())


def test_a_single_file_has_the_folders_names_and_its_shapes_tell_the_sizes(file: Path, qwen: Path) -> None:
    config = open_file(file, LAYOUT).denoiser_config
    told = json.loads((qwen / "transformer" / "config.json").read_bytes())
    same = [name for name in told if not name.startswith("_") and name in config]
    assert {name: config[name] for name in same} == {name: told[name] for name in same} and len(same) > 7
    assert family_of(str(file)) == QwenImage() == family_of(str(qwen))
    read, (source,) = OriginalReader(file, LAYOUT), (qwen / "transformer").glob("*.safetensors")
    for name, tensor in load_file(source).items():
        assert torch.equal(read.get(name), tensor)
    published = bundled_configs()["qwen_image"]["transformer"]
    shapes = {name: list(shape) for name, shape in shapes_of_class(CLASS, published).items()}
    assert len(shapes) == 1933
    inferred = LAYOUT.infer(shapes)
    assert {name: inferred[name] for name in published} == dict(published)


def test_a_missing_part_is_named(file: Path) -> None:
    words = said(QwenImage(pretrained=str(file)))
    assert "contains no autoencoder (VAE). Set model.vae" in words
    assert "contains no Qwen2.5-VL, tokenizers. Set model.text_encoders" in words and NEWEST in words
    assert "contains no" not in said(QwenImage(transformer=str(file)))  # the others are those of pretrained


@pytest.mark.parametrize(
    ("name", "what"),
    [("Qwen/Qwen-Image-Edit", "Qwen-Image-Edit, which reads"), ("Qwen/Qwen-Image-Edit-2511", "Qwen-Image-Edit"),
     ("qwen_image_edit_2509_bf16.safetensors", "Qwen-Image-Edit"), ("Qwen/Qwen-Image-Layered", "Qwen-Image-Layered"),
     ("InstantX/Qwen-Image-ControlNet-Union", "a ControlNet of Qwen-Image"), ("Qwen/Qwen-Image-2.1", "Qwen-Image-2.1"),
     ("lightx2v/Qwen-Image-Lightning", "Qwen-Image-Lightning, which draws in few steps")],
)  # fmt: skip
def test_similar_models_are_refused_by_their_names(name: str, what: str) -> None:
    words = said(QwenImage(pretrained=name))
    assert words.startswith(f"model.pretrained: {name} is, by its name, {what}") and words.endswith(f"Use {NEWEST}")


def test_and_by_what_is_in_them(file: Path, qwen: Path, tmp_path: Path) -> None:
    """Edit's tensors are the base's, so its pipeline or its configuration tells it."""
    whole, other = load_file(file), tmp_path / "other.safetensors"
    for more, what in (
        ("time_text_embed.addition_t_embedding.weight", "Qwen-Image-Layered"),
        ("controlnet_blocks.0.weight", "a ControlNet of Qwen-Image"),
        ("txt_in.text_norm.weight", "Qwen-Image-2.1"),
    ):
        save_file({**whole, more: torch.ones(2, 4)}, other)
        with pytest.raises(UserError, match=rf"by its tensor {more}\) is {what}.*Use {NEWEST}"):
            open_file(other, LAYOUT)
    folder = shutil.copytree(qwen, tmp_path / "pipeline")
    for text, what in (("Edit", "Qwen-Image-Edit"), ("EditPlus", "Qwen-Image-Edit"), ("Layered", "Qwen-Image-Layered")):
        index = json.loads((qwen / "model_index.json").read_bytes()) | {"_class_name": f"QwenImage{text}Pipeline"}
        (folder / "model_index.json").write_text(json.dumps(index))
        assert said(QwenImage(pretrained=str(folder))).startswith(f"model.pretrained: {folder} is {what}, which")
    shutil.copy(qwen / "model_index.json", folder)
    config = json.loads((qwen / "transformer" / "config.json").read_bytes())
    for setting, what in (("zero_cond_t", "Qwen-Image-Edit-2511"), ("use_layer3d_rope", "Qwen-Image-Layered")):
        (folder / "transformer" / "config.json").write_text(json.dumps(config | {setting: True}))
        with pytest.raises(UserError, match=f"{folder}: {what}, which"):
            QwenImage(pretrained=str(folder)).files.known_config()


@pytest.mark.parametrize(
    ("leaf", "tensor", "what"),
    [("weight_scale", torch.ones(1), "scaled fp8"), ("qweight", torch.ones(4, dtype=torch.int8), "the type I8"),
     ("comfy_quant", torch.ones(4, dtype=torch.uint8), "the type U8")],
)  # fmt: skip
def test_a_quantised_file_is_refused(leaf: str, tensor: Tensor, what: str, file: Path) -> None:
    save_file(load_file(file) | {f"model.diffusion_model.transformer_blocks.0.img_mlp.net.2.{leaf}": tensor}, file)
    with pytest.raises(UserError, match=f"its transformer is in {what}.*Use the fp16 or bf16 file"):
        open_file(file, LAYOUT).check("transformer")


def test_the_public_models_are_open_and_their_cards_say_their_licence(qwen: Path, tiny_pipeline: Path) -> None:
    for name in (NEWEST, FIRST):
        base = public_base(name)
        assert base is not None and (base.gated, base.licence, base.commercial) == (False, "Apache-2.0", "yes")
    config = validate({"name": "x", "model": {"family": "qwen_image"}, "data": {"path": "demo:pictures"}}, "x")
    drawn = config.validation
    assert (config.data.resolution, drawn.guidance, drawn.steps, drawn.negative_prompt) == (1024, 4.0, 50, " ")
    assert licence(config) == {"license": "apache-2.0"}
    for name in ("someone/Qwen-Image-style", "qwen_image_2512_bf16.safetensors"):
        assert isinstance(family_by_name(name), QwenImage), name
    for wrong, base_of, right in (("sd3", qwen, "qwen_image"), ("qwen_image", tiny_pipeline, "sd3")):
        with pytest.raises(ConfigError, match=f"Set model.family to {right}"):
            data = {"name": "x", "model": {"family": wrong, "pretrained": str(base_of)}, "data": {"path": "x"}}
            validate(data, "x")
    assert isinstance(family_of(str(tiny_pipeline)), SD3)
