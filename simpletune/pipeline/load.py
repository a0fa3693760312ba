"""Load the base model according to the memory options, for training and for drawing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from simpletune.config.schema import TrainConfig
from simpletune.families import Model
from simpletune.memory import Memory
from simpletune.models.buckets import Size
from simpletune.models.transformer import Transformer
from simpletune.pipeline.modulation_plan import Modulation, detach_modulation
from simpletune.quant.precision import WeightPrecision


def load_base(
    config: TrainConfig, device: torch.device, sizes: Collection[Size], cache: Path | None = None
) -> Transformer:
    """Load the base model, cropping positions and keeping modules in host memory as the memory options say.

    Args:
        config: the configuration, with folders resolved.
        device: the target device.
        sizes: (width, height) in pixels of every picture that it will see.
        cache: the root folder of the cache for the quantised base; None disables caching.
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
    """Like ``load_base``, with uninitialised weights, whose values do not affect memory."""
    return model.empty_transformer(
        precision, device, on_host=stays_on_host(memory, model), sizes=sizes if memory.crop_positions else None
    )


def stays_on_host(memory: Memory, model: Model) -> Callable[[str], bool]:
    """Return a predicate: whether the module of a given name stays in host memory when the base is loaded."""
    streamed = memory.on_host(model.units())
    planned = memory.modulation == "plan"
    return lambda name: streamed(name) or (planned and model.is_conditioning(name))


def modulation_of(
    transformer: Transformer, memory: Memory, precision: WeightPrecision, device: torch.device
) -> Modulation | None:
    """Detach and return a transformer's modulation if ``memory.modulation`` is plan; otherwise None."""
    if memory.modulation != "plan":
        return None
    return detach_modulation(transformer, precision, device, memory.modulation_window)
