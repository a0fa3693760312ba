"""Loading the base model as the memory options say: for training and for drawing alike."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simpletune.memory import Memory
from simpletune.models import Model
from simpletune.models.sd3_shapes import is_conditioning
from simpletune.models.sizes import Size
from simpletune.pipeline.modulation_plan import Modulation, detach_modulation
from simpletune.quant.precision import WeightPrecision


def load_base(
    model: Model,
    memory: Memory,
    precision: WeightPrecision,
    device: torch.device,
    sizes: Collection[Size],
    seed: int = 0,
    cache: Path | None = None,
) -> nn.Module:
    """The base model, its positions cut to the pictures, and what a modulation plan needs in host memory.

    Args:
        model: with folders resolved.
        memory: what stays where.
        precision: how weights are held.
        device: where to.
        sizes: (width, height) in pixels of every picture that it will see.
        seed: for random weights.
        cache: the cache's root, where a quantised base is kept; None: it is not.
    """
    return model.load_transformer(
        precision,
        device,
        seed,
        on_host=stays_on_host(memory, model),
        sizes=sizes if memory.crop_positions else None,
        cache=cache,
    )


def empty_base(
    model: Model, memory: Memory, precision: WeightPrecision, device: torch.device, sizes: Collection[Size]
) -> nn.Module:
    """As ``load_base``, without values: memory does not depend on them."""
    return model.empty_transformer(
        precision, device, on_host=stays_on_host(memory, model), sizes=sizes if memory.crop_positions else None
    )


def stays_on_host(memory: Memory, model: Model) -> Callable[[str], bool]:
    """Whether the module of a name stays in host memory when the base is loaded."""
    streamed = memory.on_host(model.blocks())
    planned = memory.modulation == "plan"
    return lambda name: streamed(name) or (planned and is_conditioning(name))


def modulation_of(
    transformer: nn.Module, memory: Memory, precision: WeightPrecision, device: torch.device
) -> Modulation | None:
    """With the modulation plan: the modulation of a transformer, taken out of it; else None."""
    if memory.modulation != "plan":
        return None
    return detach_modulation(transformer, precision, device, memory.modulation_window)


def device_of(transformer: Any) -> torch.device:
    """Where a transformer computes: its output layer is never streamed."""
    return transformer.proj_out.weight.device
