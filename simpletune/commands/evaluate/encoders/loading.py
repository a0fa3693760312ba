"""Find an encoder by folder or hub name, and load it."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from simpletune.commands.evaluate.encoders.clip import Clip
from simpletune.commands.evaluate.encoders.dino import Dino, Dino2
from simpletune.commands.evaluate.encoders.encoder import EncoderInfo, ImageEncoder
from simpletune.commands.evaluate.encoders.siglip import Siglip
from simpletune.data.demo import ENCODERS
from simpletune.models.shared.transformers_folder import ModelFolder, find_folder
from simpletune.system.model_folder import fingerprint, weight_files
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header

KINDS: dict[str, tuple[str, type[ImageEncoder]]] = {
    "vit": ("dino", Dino),
    "dinov2": ("dinov2", Dino2),
    "dinov2_with_registers": ("dinov2", Dino2),
    "clip": ("clip", Clip),
    "siglip": ("siglip", Siglip),
}
"""The kind and the class of each ``model_type`` in a config.json. SigLIP 2 at a fixed size has SigLIP's type."""
EXAMPLES = "facebook/dino-vits16 or openai/clip-vit-large-patch14"


def find_encoder(name: str, option: str = "--encoders", kinds: Collection[str] = ()) -> EncoderInfo:
    """Find an encoder and read its configuration; load no weights.

    Args:
        name: a folder, a hub name, or a demo name (``demo:tiny-dino``).
        option: the option that named it, for messages.
        kinds: kinds that the option accepts, as in `KINDS`; empty: all.

    Raises:
        UserError: there is no such encoder, its kind is unknown or not accepted, or it has no safetensors.
    """
    place = _folder(name, option)
    kind = KINDS[place.model_type(KINDS, EXAMPLES)][0]
    if kinds and kind not in kinds:
        raise UserError(f"{option}: {name} is a {kind} model. Use one of {', '.join(kinds)}")
    parameters = _parameters(place)
    return EncoderInfo(name, place.folder, kind, fingerprint(place.folder), parameters, option)


def load_encoder(about: EncoderInfo, device: torch.device) -> ImageEncoder:
    """Load an encoder.

    Raises:
        UserError: its folder is damaged.
    """
    return class_of(about)(about, device)


def class_of(about: EncoderInfo) -> type[ImageEncoder]:
    """Return the class of an encoder."""
    return KINDS[about.place.model_type(KINDS, EXAMPLES)][1]


def _folder(name: str, option: str) -> ModelFolder:
    if name.startswith("demo:"):
        if name not in ENCODERS:
            raise UserError(f"{option}: {name}: unknown demo name. Use one of {', '.join(ENCODERS)}")
        return ModelFolder(ENCODERS[name], option, "encoder")
    return find_folder(name, option, "encoder", "facebook/dino-vits16")


def _parameters(place: ModelFolder) -> int:
    """Count the weights in the headers of a folder's files.

    Raises:
        UserError: there are only pickles, or a file is damaged.
    """
    place.refuse_pickles()
    headers = [read_header(file) for file in weight_files(place.folder)]
    shapes = [entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"]
    return sum(math.prod(shape) for shape in shapes)
