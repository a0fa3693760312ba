"""Derive a UNet's modules and parameters from its configuration, without torch or weights.

Names and shapes are diffusers' (``UNet2DConditionModel``); a test compares them with diffusers, for the configurations
of Stable Diffusion 1.5 and 2.1.

Legend: c channels of a level, d = c the width of its attention, e the width of the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from simpletune.models.sd15.config import Level, complete_config, levels_of
from simpletune.models.shared.buckets import DOWNSAMPLING, Size
from simpletune.models.shared.model_config import ModelConfig, Shape, linear

Kind = Literal["resnet", "attention", "downsampler", "upsampler"]
RESNET: Kind = "resnet"
ATTENTION: Kind = "attention"
DOWNSAMPLER: Kind = "downsampler"
UPSAMPLER: Kind = "upsampler"


@dataclass(frozen=True)
class Unit:
    """A module of the UNet that runs as one unit: a residual block, an attention, or a change of resolution.

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
    """Return the UNet's units in the order of the forward pass.

    Args:
        config: the UNet's ``config.json``.
    """
    levels = levels_of(config)
    down, widths = _way_down(levels)
    middle = [
        Unit(f"mid_block.{name}", kind, widths[-1], widths[-1], len(levels) - 1, levels[-1])
        for name, kind in (("resnets.0", RESNET), ("attentions.0", ATTENTION), ("resnets.1", RESNET))
    ]
    return [*down, *middle, *_way_up(levels, widths)]


def _way_down(levels: list[Level]) -> tuple[list[Unit], list[int]]:
    """Return the units before the middle, and the channels of the skip connections, which ``conv_in`` begins."""
    width = levels[0].channels
    units, widths = list[Unit](), [width]
    for number, level in enumerate(levels):
        block = f"down_blocks.{number}"
        for layer in range(level.layers):
            name = f"{block}.resnets.{layer}"
            units.append(Unit(name, RESNET, width, level.channels, number, level))
            width = level.channels
            if level.attends_down:
                name = f"{block}.attentions.{layer}"
                units.append(Unit(name, ATTENTION, width, width, number, level))
            widths.append(width)
        if number < len(levels) - 1:
            name = f"{block}.downsamplers.0"
            units.append(Unit(name, DOWNSAMPLER, width, width, number + 1, level))
            widths.append(width)
    return units, widths


def _way_up(levels: list[Level], skips: list[int]) -> list[Unit]:
    """Return the units after the middle, each level with one more residual block than on the way down."""
    units, width, waiting = list[Unit](), levels[-1].channels, list(skips)
    for number, level in enumerate(reversed(levels)):
        block, halvings = f"up_blocks.{number}", len(levels) - 1 - number
        for layer in range(level.layers + 1):
            inputs = width + waiting.pop()
            units.append(Unit(f"{block}.resnets.{layer}", RESNET, inputs, level.channels, halvings, level))
            width = level.channels
            if level.attends_up:
                units.append(Unit(f"{block}.attentions.{layer}", ATTENTION, width, width, halvings, level))
        if halvings:
            units.append(Unit(f"{block}.upsamplers.0", UPSAMPLER, width, width, halvings - 1, level))
    return units


def pixels(size: Size, halvings: int) -> int:
    """Return the pixels of a latent whose sides have been halved; a downsampler rounds up.

    Args:
        size: (width, height) of the picture in pixels.
        halvings: how often.
    """
    return math.prod(-(-side // DOWNSAMPLING // 2**halvings) for side in size)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter, by name, in the order of the forward pass.

    Args:
        config: the UNet's ``config.json``.
    """
    first = levels_of(config)[0].channels
    time = 4 * first
    known = complete_config(config)
    shapes = convolution("conv_in", known["in_channels"], first)
    shapes |= linear("time_embedding.linear_1", first, time) | linear("time_embedding.linear_2", time, time)
    for unit in unet_units(config):
        for name, shape in unit_shapes(unit, config).items():
            shapes[f"{unit.name}.{name}"] = shape
    return shapes | _norm("conv_norm_out", first) | convolution("conv_out", first, known["out_channels"])


UNIT = re.compile(r"((down|mid|up)_blocks?)(\.\d+)?\.(resnets|attentions|downsamplers|upsamplers)\.\d+(?=\.)")


def unit_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the units among a UNet's parameters, in the order of the forward pass.

    Args:
        names: names of parameters or modules inside the units, in any order.
    """
    return tuple(sorted({found[0] for name in names if (found := UNIT.match(name))}, key=_place))


def _place(unit: str) -> tuple[int, int, bool, int, bool]:
    """Return a unit's position in the forward pass: per layer a residual block, then an attention; resizing last."""
    way, *block, kind, number = unit.split(".")
    resizes = kind in ("downsamplers", "upsamplers")
    ways = ("down_blocks", "mid_block", "up_blocks")
    return ways.index(way), int(block[0]) if block else 0, resizes, int(number), kind == "attentions"


def unit_shapes(unit: Unit, config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of a unit's parameters, by the name inside it.

    Args:
        unit: one of the UNet's units.
        config: the UNet's ``config.json``.
    """
    if unit.kind == "resnet":
        return _resnet(unit.inputs, unit.outputs, 4 * levels_of(config)[0].channels)
    if unit.kind == "attention":
        return dict(_attention(unit, bool(config.get("use_linear_projection"))))
    return convolution("conv", unit.inputs, unit.outputs)


def _resnet(inputs: int, outputs: int, time: int) -> dict[str, Shape]:
    """Return the shapes of two convolutions with the time embedding between them; a third, 1x1, if channels change."""
    shapes = _norm("norm1", inputs) | convolution("conv1", inputs, outputs) | linear("time_emb_proj", time, outputs)
    shapes |= _norm("norm2", outputs) | convolution("conv2", outputs, outputs)
    return shapes if inputs == outputs else shapes | convolution("conv_shortcut", inputs, outputs, kernel=1)


def _attention(unit: Unit, linear_projection: bool) -> Iterator[tuple[str, Shape]]:
    """Yield the shapes of blocks of self-attention, attention to the text and a GEGLU, between two projections."""
    d, e = unit.outputs, unit.level.text
    project = linear if linear_projection else lambda name, inputs, outputs: convolution(name, inputs, outputs, 1)
    yield from (_norm("norm", d) | project("proj_in", d, d)).items()
    for number in range(unit.level.depth):
        parts: dict[str, Shape] = {}
        for attention, inputs in (("attn1", d), ("attn2", e)):
            parts |= {f"{attention}.to_q.weight": (d, d)}
            parts |= {f"{attention}.{name}.weight": (d, inputs) for name in ("to_k", "to_v")}
            parts |= linear(f"{attention}.to_out.0", d, d)
        parts |= linear("ff.net.0.proj", d, 8 * d) | linear("ff.net.2", 4 * d, d)
        parts |= _norm("norm1", d) | _norm("norm2", d) | _norm("norm3", d)
        yield from ((f"transformer_blocks.{number}.{name}", shape) for name, shape in parts.items())
    yield from project("proj_out", d, d).items()


def convolution(name: str, inputs: int, outputs: int, kernel: int = 3) -> dict[str, Shape]:
    """Return a square convolution's weight and bias."""
    return {f"{name}.weight": (outputs, inputs, kernel, kernel), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
