"""The original layout of single files of Stable Diffusion 1.x and 2.x (CompVis, Stability, ComfyUI): its parts, the
names of their tensors, and the configuration that the UNet's shapes imply.

The original layout numbers the steps on the way down and up rather than levels, and lists a step's modules: a residual
block, then an attention, then an upsampler. Inside an attention, both layouts use the same names.

2.x differs from 1.x in linear projections around attention, in heads of width 64 and in the text encoder, which has
OpenCLIP's names. The base models (epsilon) and the others (v) of 2.x have the same shapes, so a file does not reveal
which it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
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
IN_VAE = {"conv_in": "conv_in", "conv_norm_out": "norm_out", "conv_out": "conv_out"}
IN_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
IN_VAE_ATTENTION |= {"query": "q", "key": "k", "value": "v", "proj_attn": "proj_out"}  # of published files
OUTER_CLIP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
IN_CLIP = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
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


def origins_beside(part: str, names: Collection[str], config: ModelConfig) -> dict[str, Origin]:
    """See ``FileLayout.others``: of the autoencoder and the text encoder."""
    deepest = max((int(name.split(".")[2]) for name in names if name.startswith("encoder.down_blocks.")), default=0)
    found: dict[str, Origin] = {}
    for name in names:
        own = name.removeprefix("text_model.")
        try:
            if part == "vae":
                found[name] = _vae_origin(name, deepest)
            elif not config.get("use_linear_projection"):
                found[name] = Origin(f"{CLIP}text_model.{own}")
            elif own != "embeddings.position_ids":
                found[name] = _open_clip_origin(own)
        except KeyError:
            raise KeyError(name) from None
    return found


def _vae_origin(name: str, deepest: int) -> Origin:
    """The source of an autoencoder's tensor. Originally, the levels on the way up are numbered from the top, too."""
    side, _, inner = name.partition(".")
    if side in ("quant_conv", "post_quant_conv"):
        return Origin(name)
    layer, _, leaf = inner.rpartition(".")
    if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)samplers\.0)\.(\w+)", layer):
        way, block, resnet, own = match.groups()
        level = f"{side}.{way}.{int(block) if way == 'down' else deepest - int(block)}"
        place = f"{way}sample" if resnet is None else f"block.{resnet}"
        return Origin(f"{level}.{place}.{own.replace('conv_shortcut', 'nin_shortcut')}.{leaf}")
    if match := re.fullmatch(r"mid_block\.resnets\.([01])\.(\w+)", layer):
        return Origin(f"{side}.mid.block_{int(match[1]) + 1}.{match[2]}.{leaf}")
    if layer.startswith("mid_block.attentions.0."):
        own = IN_VAE_ATTENTION[layer.removeprefix("mid_block.attentions.0.")]
        return Origin(f"{side}.mid.attn_1.{own}.{leaf}", pointwise=own != "norm" and leaf == "weight")
    return Origin(f"{side}.{IN_VAE[layer]}.{leaf}")


def _open_clip_origin(name: str) -> Origin:
    """The source of a text encoder's tensor under OpenCLIP's names, where q, k and v are one."""
    if name in OUTER_CLIP:
        return Origin(OPEN_CLIP + OUTER_CLIP[name])
    match = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        raise KeyError(name)
    number, layer, leaf = match.groups()
    block, fused = f"{OPEN_CLIP}transformer.resblocks.{number}", re.fullmatch(r"self_attn\.([qkv])_proj", layer)
    if fused:
        return Origin(f"{block}.attn.in_proj_{leaf}", third="qkv".index(fused[1]))
    return Origin(f"{block}.{IN_CLIP[layer]}.{leaf}")


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
    others=origins_beside,
)
