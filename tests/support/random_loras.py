"""LoRAs with random updates."""

from __future__ import annotations

from pathlib import Path

import torch

from simpletune.adapters.files.base_reader import BaseReader
from simpletune.adapters.files.updates import LoraUpdate


def random_lora(pipeline: Path, seed: int, rank: int = 4, scale: float = 1.0) -> dict[str, LoraUpdate]:
    """Updates of every linear layer, large enough to show."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (o, i, *kernel) in BaseReader(str(pipeline)).weight_shapes().items():
        if kernel not in ([], [1, 1]):
            continue
        down, up = torch.randn(rank, i, generator=generator), torch.randn(o, rank, generator=generator)
        found[name] = LoraUpdate(down / i**0.5, up / rank**0.5, 0.3 * scale)
    return found
