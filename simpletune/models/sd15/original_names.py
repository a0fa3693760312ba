"""Map diffusers' tensors of the UNet to the original layout (CompVis, Stability, ComfyUI).

The original layout numbers the steps on the way down and up rather than levels, and lists a step's modules: a residual
block, then an attention, then an upsampler. Inside an attention, both layouts use the same names.
"""

from __future__ import annotations

from simpletune.models.sd15.shapes import DOWNSAMPLER, RESNET, parameter_shapes, unet_units
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import Origin

OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
IN_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def original_modules(config: ModelConfig) -> dict[str, str]:
    """Return the original name of each unit, by diffusers' name.

    Args:
        config: the UNet's ``config.json``.
    """
    found: dict[str, str] = {}
    steps = {"down": 0, "mid": -1, "up": -1}
    inside = 0  # modules in the current step
    for unit in unet_units(config):
        way = unit.name.partition("_")[0]
        if way == "mid":
            steps["mid"] += 1
            found[unit.name] = f"middle_block.{steps['mid']}"
            continue
        if unit.kind in (RESNET, DOWNSAMPLER):
            steps[way], inside = steps[way] + 1, 0
        blocks = "input_blocks" if way == "down" else "output_blocks"
        found[unit.name] = f"{blocks}.{steps[way]}.{inside}"
        inside += 1
    return found


def origins(config: ModelConfig) -> dict[str, Origin]:
    """Return the source of each of the UNet's tensors, by diffusers' name.

    Args:
        config: the UNet's ``config.json``.
    """
    modules = original_modules(config)
    return {name: Origin(_origin_of(name, modules)) for name in parameter_shapes(config)}


def _origin_of(name: str, modules: dict[str, str]) -> str:
    layer, _, leaf = name.rpartition(".")
    if layer in OUTER:
        return f"{OUTER[layer]}.{leaf}"
    unit = ".".join(layer.split(".")[: 3 if layer.startswith("mid_block.") else 4])
    inner = layer.removeprefix(f"{unit}.")
    if ".resnets." in unit:
        return f"{modules[unit]}.{IN_RESNET[inner]}.{leaf}"
    if ".downsamplers." in unit:
        inner = "op"
    return f"{modules[unit]}.{inner}.{leaf}"
