"""Find an encoder by folder or hub name, and load it."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from simpletune.commands.evaluate.encoders.clip import Clip, Siglip
from simpletune.commands.evaluate.encoders.dino import Dino, Dino2
from simpletune.commands.evaluate.encoders.encoder import EncoderInfo, ImageEncoder
from simpletune.data.demo import ENCODERS
from simpletune.models.shared.transformers_folder import ModelFolder, find_folder
from simpletune.system.model_folder import fingerprint, weight_files
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header

KINDS: dict[str, type[ImageEncoder]] = {
    "vit": Dino, "dinov2": Dino2, "dinov2_with_registers": Dino2, "clip": Clip, "siglip": Siglip,
}  # fmt: skip
"""The class of each ``model_type`` in a config.json. SigLIP 2 at a fixed size has SigLIP's type."""
EXAMPLES = "facebook/dino-vits16 or openai/clip-vit-large-patch14"


def find_encoder(name: str, option: str = "--encoders", kinds: Collection[str] = ()) -> EncoderInfo:
    """Find an encoder by folder, hub name or demo name (``demo:tiny-dino``); load no weights.

    Messages name the option, which accepts encoders of these names; empty: all.
    """
    if name.startswith("demo:"):
        if name not in ENCODERS:
            raise UserError(f"{option}: {name}: unknown demo name. Use one of {', '.join(ENCODERS)}")
        place = ModelFolder(ENCODERS[name], option, "encoder")
    else:
        place = find_folder(name, option, "encoder", "facebook/dino-vits16")
    kind = KINDS[place.model_type(KINDS, EXAMPLES)]
    if kinds and kind.name not in kinds:
        raise UserError(f"{option}: {name} is a {kind.name} model. Use one of {', '.join(kinds)}")
    place.refuse_pickles()
    headers = [read_header(file) for file in weight_files(place.folder)]
    shapes = [entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"]
    parameters = sum(math.prod(shape) for shape in shapes)
    return EncoderInfo(name, place, kind, fingerprint(place.folder), parameters)


def load_encoder(about: EncoderInfo, device: torch.device) -> ImageEncoder:
    return about.kind(about, device)
