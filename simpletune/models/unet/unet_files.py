"""The original layout of UNets in single files (CompVis, Stability, ComfyUI): the names of their tensors and of those
of the parts beside them, and the configuration that the shapes imply.

The original layout numbers the steps on the way down and up rather than levels, and lists a step's modules: a residual
block, then an attention, then an upsampler. Inside an attention, both layouts use the same names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from simpletune.models.shared.fused import THIRDS
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import Origin
from simpletune.models.unet.unet_shapes import ATTENTION, DOWNSAMPLER, RESNET, parameter_shapes, unet_units
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from torch import Tensor

OPEN_CLIP = "model."
"""Prefix of a text encoder's tensors with OpenCLIP's names."""
HEAD_WIDTH = 64
"""Width of a head, except in Stable Diffusion 1.x, which has 8 heads at every level."""
OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
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


def inferred(shapes: Mapping[str, list[int]], known: ModelConfig) -> ModelConfig:
    """Infer a UNet's configuration: ``known``, with what the shapes of its tensors by original names imply. Raises
    UserError if the middle or the way up has other attentions than the way down, as in pruned models."""
    levels: list[tuple[int, int, int]] = [(shapes["input_blocks.0.0.weight"][0], 0, 0)]  # channels, layers, depth
    text = known["cross_attention_dim"]
    for step in range(1, 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("input_blocks."))):
        channels, layers, _ = levels[-1]
        if f"input_blocks.{step}.0.op.weight" in shapes:
            levels.append((channels, 0, 0))
            continue
        channels = shapes[f"input_blocks.{step}.0.in_layers.2.weight"][0]
        attention = f"input_blocks.{step}.1"
        depth = _depth(shapes, attention)
        text = shapes[f"{attention}.transformer_blocks.0.attn2.to_k.weight"][1] if depth else text
        levels[-1] = channels, layers + 1, depth
    cross = ["CrossAttn" if depth else "" for _, _, depth in levels]
    # A level without attention may be narrower than a head.
    heads, depths = known["attention_head_dim"], _one_or_all([depth or 1 for _, _, depth in levels])
    config = {
        **known,
        **({} if depths == 1 else {"transformer_layers_per_block": depths}),  # of which 1 is diffusers' default
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": [channels for channels, _, _ in levels],
        "layers_per_block": _one_or_all([layers for _, layers, _ in levels]),
        "attention_head_dim": heads if isinstance(heads, int) else [max(1, c // HEAD_WIDTH) for c, _, _ in levels],
        "cross_attention_dim": text,
        "down_block_types": [f"{prefix}DownBlock2D" for prefix in cross],
        "up_block_types": [f"{prefix}UpBlock2D" for prefix in reversed(cross)],
    }
    modules = original_modules(config)
    for unit in unet_units(config):
        depth = _depth(shapes, modules[unit.name])
        if unit.kind == ATTENTION and depth != unit.level.depth:
            raise UserError(
                f"{modules[unit.name]} has {depth} transformer blocks, and the way down has {unit.level.depth} at that "
                "resolution: a pruned UNet (such as SSD-1B, Segmind Vega, KOALA), which cannot be trained. Use the "
                "model that it was made from"
            )
    return config


def _depth(shapes: Collection[str], attention: str) -> int:
    """Count the transformer blocks of an attention, by its original name."""
    blocks = f"{attention}.transformer_blocks."
    return len({name.removeprefix(blocks).partition(".")[0] for name in shapes if name.startswith(blocks)})


def _one_or_all(values: list[int]) -> int | list[int]:
    """Return the value that all levels share, or the levels' values."""
    return values[0] if len(set(values)) == 1 else values


def original_modules(config: ModelConfig) -> dict[str, str]:
    """Return the original name of each unit, by diffusers' name."""
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
    """Return the source of each of the UNet's tensors, by diffusers' name."""
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


def vae_origins(names: Collection[str]) -> dict[str, Origin]:
    """Return the source of each autoencoder tensor, by diffusers' name. Raises KeyError if there is no such tensor."""
    deepest = max((int(name.split(".")[2]) for name in names if name.startswith("encoder.down_blocks.")), default=0)
    found: dict[str, Origin] = {}
    for name in names:
        try:
            found[name] = _vae_origin(name, deepest)
        except KeyError:
            raise KeyError(name) from None
    return found


def _vae_origin(name: str, deepest: int) -> Origin:
    """Return an autoencoder tensor's source. Originally, the levels on the way up are numbered from the top, too."""
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


def open_clip_tensors(tensors: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Return a text encoder's tensors under transformers' names, from OpenCLIP's. ``width``: of its states."""
    from types import SimpleNamespace

    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    sizes = SimpleNamespace(config=SimpleNamespace(hidden_size=width))
    return dict(convert_open_clip_checkpoint(sizes, dict(tensors), prefix=OPEN_CLIP))


def open_clip_origin(name: str) -> Origin:
    """Return the source of a text encoder's tensor under OpenCLIP's names, where q, k and v are one and the projection
    is transposed. Raises KeyError if there is no such tensor."""
    if name == "text_projection.weight":
        return Origin(f"{OPEN_CLIP}text_projection", transposed=True)
    if name in OUTER_CLIP:
        return Origin(OPEN_CLIP + OUTER_CLIP[name])
    match = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        raise KeyError(name)
    number, layer, leaf = match.groups()
    block, fused = f"{OPEN_CLIP}transformer.resblocks.{number}", re.fullmatch(r"self_attn\.([qkv])_proj", layer)
    if not fused and layer not in IN_CLIP:
        raise KeyError(name)
    if fused:
        return Origin(f"{block}.attn.in_proj_{leaf}", THIRDS["qkv".index(fused[1])])
    return Origin(f"{block}.{IN_CLIP[layer]}.{leaf}")
