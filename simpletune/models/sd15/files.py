"""The original layout of single files of Stable Diffusion 1.x and 2.x (CompVis, Stability, ComfyUI): its parts, the
names of the UNet's tensors, and the configuration that their shapes imply.

The original layout numbers the steps on the way down and up rather than levels, and lists a step's modules: a residual
block, then an attention, then an upsampler. Inside an attention, both layouts use the same names.

2.x differs from 1.x in linear projections around attention, in heads of width 64 and in the text encoder, which has
OpenCLIP's names. The base models (epsilon) and the others (v) of 2.x have the same shapes, so a file does not reveal
which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from simpletune.models.sd15.config import bundled_configs
from simpletune.models.sd15.shapes import DOWNSAMPLER, RESNET, parameter_shapes, unet_units
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import FileLayout, Origin, SingleFile

if TYPE_CHECKING:
    from torch import Tensor

FIRST_ATTENTION = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
PROJECTION = "input_blocks.1.1.proj_in.weight"
CLIP, OPEN_CLIP = "transformer.", "model."
"""Prefixes of a text encoder's tensors: 1.x has transformers' names, 2.x OpenCLIP's."""
SD2_HEAD_WIDTH = 64
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


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """The UNet's configuration, from its tensors' shapes by original names."""
    linear = len(shapes[PROJECTION]) == 2
    known = bundled_configs()["sd2" if linear else "sd15"]["unet"]
    levels: list[tuple[int, int, bool]] = [(shapes["input_blocks.0.0.weight"][0], 0, False)]
    for step in range(1, 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("input_blocks."))):
        channels, layers, _ = levels[-1]
        if f"input_blocks.{step}.0.op.weight" in shapes:
            levels.append((channels, 0, False))
            continue
        channels = shapes[f"input_blocks.{step}.0.in_layers.2.weight"][0]
        levels[-1] = channels, layers + 1, f"input_blocks.{step}.1.proj_in.weight" in shapes
    cross = ["CrossAttn" if attends else "" for _, _, attends in levels]
    counts = {layers for _, layers, _ in levels}
    return {
        **known,
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": [channels for channels, _, _ in levels],
        "layers_per_block": counts.pop() if len(counts) == 1 else [layers for _, layers, _ in levels],
        "attention_head_dim": [c // SD2_HEAD_WIDTH for c, _, _ in levels] if linear else known["attention_head_dim"],
        "cross_attention_dim": shapes[FIRST_ATTENTION][1],
        "down_block_types": [f"{prefix}DownBlock2D" for prefix in cross],
        "up_block_types": [f"{prefix}UpBlock2D" for prefix in reversed(cross)],
    }


def original_modules(config: ModelConfig) -> dict[str, str]:
    """The original name of each unit, by diffusers' name."""
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
    """The source of each of the UNet's tensors, by diffusers' name."""
    modules = original_modules(config)
    found: dict[str, Origin] = {}
    for name in parameter_shapes(config):
        layer, _, leaf = name.rpartition(".")
        if layer in OUTER:
            found[name] = Origin(f"{OUTER[layer]}.{leaf}")
            continue
        unit = ".".join(layer.split(".")[: 3 if layer.startswith("mid_block.") else 4])
        inner = layer.removeprefix(f"{unit}.")
        if ".resnets." in unit:
            inner = IN_RESNET[inner]
        elif ".downsamplers." in unit:
            inner = "op"
        found[name] = Origin(f"{modules[unit]}.{inner}.{leaf}")
    return found


def version_of(file: SingleFile) -> str:
    """The version of a file with a UNet or a text encoder: sd15 or sd2, a key of ``bundled_configs``."""
    projection = file.header.get(file.prefix + PROJECTION)
    if projection is not None:
        return "sd2" if len(projection["shape"]) == 2 else "sd15"
    open_clip = LAYOUT.prefixes["text_encoder"] + OPEN_CLIP
    return "sd2" if any(name.startswith(open_clip) for name in file.header) else "sd15"


def text_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """See ``FileLayout.text``. Leaves out what Stable Diffusion does not use: projections, OpenCLIP-H's last layer."""
    from types import SimpleNamespace

    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    found = {name.removeprefix(CLIP): tensor for name, tensor in tensors.items() if name.startswith(CLIP)}
    if not found:
        sizes = SimpleNamespace(config=SimpleNamespace(hidden_size=config["hidden_size"]))
        found = convert_open_clip_checkpoint(sizes, dict(tensors), prefix=OPEN_CLIP)
    last = f"encoder.layers.{config['num_hidden_layers']}."
    unused = ("position_ids", "logit_scale", "text_projection.weight")
    named = {name.removeprefix("text_model."): tensor for name, tensor in found.items()}
    return {name: t for name, t in named.items() if not name.endswith(unused) and not name.startswith(last)}


LAYOUT = FileLayout(
    family="SD 1.5/2",
    denoiser="unet",
    marker=FIRST_ATTENTION,
    prefixes={"vae": "first_stage_model.", "text_encoder": "cond_stage_model."},
    infer=_infer,
    origins=origins,
    text=text_tensors,
)
