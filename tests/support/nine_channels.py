"""Tiny pipelines whose UNet reads a mask and a masked picture, from those of ``tiny_sd15`` and ``tiny_sdxl``."""

from __future__ import annotations

from pathlib import Path

from diffusers import UNet2DConditionModel

from benchmarks.tiny_models import tiny_sd3


def to_nine_channels(folder: Path, seed: int = 3) -> Path:
    """Replace the UNet of a pipeline's folder by a random one of nine channels, and return the folder."""
    config = UNet2DConditionModel.load_config(folder / "unet")
    with tiny_sd3.seeded(seed, 1):
        tiny_sd3.save_model(UNet2DConditionModel.from_config({**config, "in_channels": 9}), folder / "unet", "fp32")
    return folder
