"""Loading the base model as the memory options say: for training and for drawing alike."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from simpletune.config.schema import TrainConfig
from simpletune.memory import Memory
from simpletune.models import Model
from simpletune.models.buckets import Size
from simpletune.models.sd3_shapes import is_conditioning
from simpletune.models.transformer import Transformer
from simpletune.pipeline.modulation_plan import Modulation, detach_modulation
from simpletune.quant.precision import WeightPrecision


def load_base(
    config: TrainConfig, device: torch.device, sizes: Collection[Size], cache: Path | None = None
) -> Transformer:
    """The base model, its positions cut to the pictures, and what a modulation plan needs in host memory.

    Args:
        config: with folders resolved.
        device: where to.
        sizes: (width, height) in pixels of every picture that it will see.
        cache: the cache's root, where a quantised base is kept; None: it is not.
    """
    return config.model.load_transformer(
        config.precision,
        device,
        config.train.seed,
        on_host=stays_on_host(config.memory, config.model),
        sizes=sizes if config.memory.crop_positions else None,
        cache=cache,
    )


def empty_base(
    model: Model, memory: Memory, precision: WeightPrecision, device: torch.device, sizes: Collection[Size]
) -> Transformer:
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
    transformer: Transformer, memory: Memory, precision: WeightPrecision, device: torch.device
) -> Modulation | None:
    """With the modulation plan, detach a transformer's modulation and return it; else None."""
    if memory.modulation != "plan":
        return None
    return detach_modulation(transformer, precision, device, memory.modulation_window)


def device_of(transformer: Transformer) -> torch.device:
    """Where a transformer computes: its output layer is never streamed."""
    return transformer.proj_out.weight.device
