"""A UNet's modules, derived from its configuration without torch, and its parameters.

Names are diffusers'; tests compare the modules with diffusers, for the configurations of Stable Diffusion 1.5, 2.1 and
XL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from simpletune.models.shared.autoencoder import STABLE_DIFFUSION
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.models.unet.unet_config import CLASS, Level, levels_of

Kind = Literal["resnet", "attention", "downsampler", "upsampler"]
RESNET: Kind = "resnet"
ATTENTION: Kind = "attention"
DOWNSAMPLER: Kind = "downsampler"
UPSAMPLER: Kind = "upsampler"


@dataclass(frozen=True)
class Unit:
    """A module of the UNet: a residual block, an attention with its transformer blocks, or a change of resolution.

    The UNet's skip connections carry activations from one unit to another, never weights.

    Args:
        name: diffusers' name of the module.
        kind: what it is.
        inputs: the channels it reads, including those of a skip connection.
        outputs: the channels it writes.
        halvings: how often the latents' sides have been halved at its output.
        level: the channels, heads and depth of its level.
    """

    name: str
    kind: Kind
    inputs: int
    outputs: int
    halvings: int
    level: Level


def unet_units(config: ModelConfig) -> list[Unit]:
    """Return the UNet's modules in the order of the forward pass."""
    levels = levels_of(config)
    width = levels[0].channels
    units, skips = list[Unit](), [width]  # the channels of skip connections, of which ``conv_in`` makes the first
    for number, level in enumerate(levels):
        block = f"down_blocks.{number}"
        for layer in range(level.layers):
            name = f"{block}.resnets.{layer}"
            units.append(Unit(name, RESNET, width, level.channels, number, level))
            width = level.channels
            if level.attends_down:
                name = f"{block}.attentions.{layer}"
                units.append(Unit(name, ATTENTION, width, width, number, level))
            skips.append(width)
        if number < len(levels) - 1:
            name = f"{block}.downsamplers.0"
            units.append(Unit(name, DOWNSAMPLER, width, width, number + 1, level))
            skips.append(width)
    for name, kind in (("resnets.0", RESNET), ("attentions.0", ATTENTION), ("resnets.1", RESNET)):
        units.append(Unit(f"mid_block.{name}", kind, width, width, len(levels) - 1, levels[-1]))
    for number, level in enumerate(reversed(levels)):
        block, halvings = f"up_blocks.{number}", len(levels) - 1 - number
        for layer in range(level.layers + 1):  # one more residual block than on the way down
            inputs = width + skips.pop()
            units.append(Unit(f"{block}.resnets.{layer}", RESNET, inputs, level.channels, halvings, level))
            width = level.channels
            if level.attends_up:
                units.append(Unit(f"{block}.attentions.{layer}", ATTENTION, width, width, halvings, level))
        if halvings:
            units.append(Unit(f"{block}.upsamplers.0", UPSAMPLER, width, width, halvings - 1, level))
    return units


def pixels(size: Size, halvings: int) -> int:
    """Return the pixels of a picture's latent whose sides have been halved this often."""
    # A downsampler rounds up.
    return math.prod(-(-side // STABLE_DIFFUSION.downsampling // 2**halvings) for side in size)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter, by name."""
    return shapes_of_class(CLASS, config)


_LAYER = re.compile(r"((down|mid|up)_blocks?)(\.\d+)?\.(resnets|attentions|downsamplers|upsamplers)\.\d+(?=\.)")
_BLOCK = re.compile(r".*\.transformer_blocks\.\d+(?=\.)")


def whole_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return residual blocks, whole attentions and changes of resolution among parameters' names, in forward order."""
    return _in_order({found[0] for name in names if (found := _LAYER.match(name))})


def single_blocks(names: Iterable[str]) -> tuple[str, ...]:
    """Return the same, with each transformer block as a unit of its own; the norm and the projections around an
    attention's blocks belong to none."""
    layers = (
        (_BLOCK if match[4] == "attentions" else _LAYER).match(name) for name in names if (match := _LAYER.match(name))
    )
    return _in_order({found[0] for found in layers if found})


def _in_order(units: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(units, key=_place))


def _place(unit: str) -> tuple[int, int, bool, int, bool, int]:
    """Return a unit's position in the forward pass: per layer a residual block, then an attention; resizing last."""
    layer, _, block = unit.partition(".transformer_blocks.")
    way, *level, kind, number = layer.split(".")
    resizes = kind in ("downsamplers", "upsamplers")
    ways = ("down_blocks", "mid_block", "up_blocks")
    attends = kind == "attentions"
    return ways.index(way), int(level[0]) if level else 0, resizes, int(number), attends, int(block or 0)
