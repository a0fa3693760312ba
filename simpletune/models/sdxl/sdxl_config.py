"""The configuration of Stable Diffusion XL that ships, and the UNets that the family refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.unet.unet_config import NEEDED, difference, inpainting_config, levels_of
from simpletune.system.options import UserError

SDXL_NAME = "stabilityai/stable-diffusion-xl-base-1.0"
HUB_NAMES: Mapping[str, str] = {
    SDXL_NAME: "sdxl",
    "diffusers/stable-diffusion-xl-1.0-inpainting-0.1": "sdxl_inpainting",
}
"""Version of each Hub name whose configurations ship with this package."""
V_PREDICTION: ModelConfig = {"prediction_type": "v_prediction"}
ZERO_SNR: ModelConfig = {"rescale_betas_zero_snr": True}
REMEDY = "Use Stable Diffusion XL base 1.0 or a model made from it"
_FREE = {"addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim"}
NEEDED_XL = {name: value for name, value in NEEDED.items() if name not in _FREE} | {"addition_embed_type": "text_time"}
REFINER_TEXT = 1280  # its UNet reads CLIP-G alone


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """Return the configurations by version (sdxl, sdxl_inpainting) and part."""
    base = json.loads((Path(__file__).parent / "parts.json").read_bytes())
    return {"sdxl": base, "sdxl_inpainting": {**base, "unet": inpainting_config(base["unet"])}}


def require_supported(config: ModelConfig, place: str) -> None:
    """Raise UserError if a configuration from ``place``, of sizes within the limits, is no UNet of this family."""
    problem, remedy = difference(config, "sdxl", NEEDED_XL), REMEDY
    if "SD3" in str(config.get("_class_name")):
        remedy = "Set model.family to sd3"
    elif config.get("addition_embed_type") is None:
        remedy = f"It seems to be Stable Diffusion 1 or 2: set model.family to sd15. {REMEDY}"
    elif problem is None and levels_of(config)[0].text == REFINER_TEXT:
        problem = "a refiner of Stable Diffusion XL, which cannot be trained"
    if problem is not None:
        raise UserError(f"{place}: {problem}. {remedy}")
