"""Pipelines of Stable Diffusion 1.5, 2 and XL whose U-Nets have two levels, for tests that only need some U-Net."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_sd15
import tiny_sdxl

TWO = {
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}
SMALL: dict[str, dict[str, Any]] = {  # as in the whole ones, heads of 64 where shapes have to tell their number
    "sd15": TWO,
    "sd2": TWO | {"block_out_channels": [64, 64], "attention_head_dim": [1, 1]},
    "sdxl": {
        "block_out_channels": [32, 64],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2],
        "attention_head_dim": [1, 1],
    },
}


def build_pipeline(folder: Path, version: str, whole: bool = False, seed: int = 5) -> Path:
    """Write ``sd15``, ``sd2``, ``sdxl``, or ``v``, an SDXL that predicts v; ``whole``: with a real one's levels."""
    if version in ("sdxl", "v"):
        return tiny_sdxl.build(folder, v=version == "v", seed=seed, unet={} if whole else SMALL["sdxl"])
    return tiny_sd15.build(folder, version, seed=seed, unet={} if whole else SMALL[version])  # type: ignore[arg-type]
