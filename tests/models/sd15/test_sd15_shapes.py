"""The UNet's modules, parameters and LoRA sizes from a configuration alone, against diffusers and published counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_sd15
import torch
from accelerate import init_empty_weights
from diffusers import UNet2DConditionModel

from simpletune.models.sd15.sd15_config import bundled_configs, require_supported
from simpletune.models.unet.unet_shapes import Unit, parameter_shapes, unet_units, whole_layers
from simpletune.system import strict_json
from simpletune.system.options import UserError

KINDS = {"ResnetBlock2D": "resnet", "Transformer2DModel": "attention", "Downsample2D": "downsampler",
         "Upsample2D": "upsampler"}  # fmt: skip
UNEVEN = {
    "block_out_channels": [32, 64, 96], "layers_per_block": [1, 2, 1], "transformer_layers_per_block": [1, 2, 3],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": [2, 4, 8], "cross_attention_dim": 16,
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    if name in ("sd15", "sd2"):
        return bundled_configs()[name]["unet"]
    if name == "uneven":
        return {"_class_name": "UNet2DConditionModel", **UNEVEN}
    version = name.removeprefix("tiny-")
    return {**tiny_sd15.UNET[version], "cross_attention_dim": tiny_sd15.TEXT[version]}


def empty(config: dict[str, Any]) -> UNet2DConditionModel:
    with init_empty_weights():
        return UNet2DConditionModel.from_config(config)


@pytest.mark.parametrize("name", ["sd15", "sd2", "tiny-sd15", "tiny-sd2", "uneven"])
def test_names_and_shapes_equal_diffusers(name: str) -> None:
    config = config_of(name)
    model = empty(config)
    assert parameter_shapes(config) == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    modules = {name: KINDS.get(type(module).__name__) for name, module in model.named_modules()}
    kinds = {name: kind for name, kind in modules.items() if kind}
    assert {unit.name: unit.kind for unit in unet_units(config)} == kinds


@pytest.mark.data
def test_the_bundled_configuration_is_the_published_one(real_data: Path) -> None:
    for part in ("unet", "vae", "text_encoder", "scheduler"):
        file = "scheduler_config.json" if part == "scheduler" else "config.json"
        published, ours = strict_json.read(real_data / "sd15_config" / part / file), bundled_configs()["sd15"][part]
        assert isinstance(published, dict)
        shared = {name: value for name, value in ours.items() if name in published}
        assert {name: published[name] for name in shared} == shared
        assert set(ours) - set(published) <= {"scaling_factor", "prediction_type"}
    assert parameter_shapes(bundled_configs()["sd15"]["unet"]) == parameter_shapes(
        strict_json.read(real_data / "sd15_config" / "unet" / "config.json")  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", ["tiny-sd15", "tiny-sd2", "uneven"])
def test_units_run_in_order_on_tensors_of_their_sizes(name: str) -> None:
    config = config_of(name)
    model = UNet2DConditionModel.from_config(config)
    units, seen = {unit.name: unit for unit in unet_units(config)}, list[str]()

    def check(unit: Unit):
        def hook(module: torch.nn.Module, args: tuple, output: Any) -> None:
            result = output[0] if isinstance(output, tuple) else output
            seen.append(unit.name)
            assert args[0].shape[1] == unit.inputs and result.shape[1] == unit.outputs
            assert result.shape[2:] == (16 // 2**unit.halvings, 8 // 2**unit.halvings)

        return hook

    for unit in units.values():
        model.get_submodule(unit.name).register_forward_hook(check(unit))
    with torch.no_grad():
        model(torch.zeros(1, 4, 16, 8), torch.zeros(1), torch.zeros(1, 5, config["cross_attention_dim"]))
    assert seen == list(units)
    assert whole_layers(name for name, _ in model.named_parameters()) == tuple(units)
    assert whole_layers(sorted(parameter_shapes(config), key=lambda name: name[::-1])) == tuple(units)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"addition_embed_type": "text_time"},
            r"addition_embed_type 'text_time' \(must be None\).* Stable Diffusion XL",
        ),
        ({"in_channels": 5}, r"in_channels 5 \(must be 4, or 9 of an inpainting model; models that read a depth map"),
        (
            {"in_channels": 8},
            r"in_channels 8 .*; models that read another picture \(InstructPix2Pix\) cannot",
        ),
        (
            {"in_channels": 9, "out_channels": 8},
            r"in_channels 9 \(must be 8, or 17 of .*that read anything else cannot",
        ),
        ({"class_embed_type": "projection"}, r"class_embed_type 'projection' \(must be None\)"),
        ({"num_attention_heads": 8}, r"num_attention_heads 8 \(must be None\)"),
        ({"mid_block_type": None}, r"mid_block_type None \(must be 'UNetMidBlock2DCrossAttn'\)"),
        ({"down_block_types": ["SimpleCrossAttnDownBlock2D"] * 4}, "must be 4 of CrossAttnDownBlock2D, DownBlock2D"),
        ({"up_block_types": ["UpBlock2D"]}, r"up_block_types \['UpBlock2D'\] \(must be 4 of"),
        ({"attention_head_dim": [5, 10]}, r"attention_head_dim \[5, 10\] \(must be one number, or 4\)"),
        ({"attention_head_dim": 7}, r"block_out_channels 320 \(must be a multiple of 32 groups and of 7 heads\)"),
        (
            {"_class_name": "SD3Transformer2DModel"},
            "is a SD3Transformer2DModel; family sd15 needs a UNet2DCondition.*Set model.family to sd3",
        ),
    ],
)
def test_other_unets_are_refused_with_what_differs(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^unet/config.json: .*{said}"):
        require_supported({**config_of("sd15"), **changes}, "unet/config.json")


def test_settings_left_out_take_diffusers_defaults() -> None:
    config = {"_class_name": "UNet2DConditionModel"}
    require_supported(config, "x")
    assert parameter_shapes(config) == {name: tuple(p.shape) for name, p in empty(config).named_parameters()}
    assert math.prod(parameter_shapes(config)["conv_in.weight"]) == 4 * 320 * 9
