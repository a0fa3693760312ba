"""Find an encoder by folder or hub name, and load it."""

from __future__ import annotations

import math

import torch

from simpletune.demo import ENCODERS
from simpletune.evaluation.encoders.clip import Clip
from simpletune.evaluation.encoders.dino import Dino, Dino2
from simpletune.evaluation.encoders.encoder import About, Encoder
from simpletune.evaluation.encoders.siglip import Siglip
from simpletune.evaluation.encoders.weights import folder_of
from simpletune.models.transformers_folder import ModelFolder, find_folder
from simpletune.options import UserError
from simpletune.system.model_folder import fingerprint, weight_files
from simpletune.system.safetensors_file import read_header

KINDS: dict[str, tuple[str, type[Encoder]]] = {
    "vit": ("dino", Dino),
    "dinov2": ("dinov2", Dino2),
    "dinov2_with_registers": ("dinov2", Dino2),
    "clip": ("clip", Clip),
    "siglip": ("siglip", Siglip),
}
"""The kind and the class of each ``model_type`` in a config.json. SigLIP 2 at a fixed size has the type of SigLIP."""


def find_encoder(name: str) -> About:
    """Find an encoder and read its configuration; load no weights.

    Args:
        name: a folder, a hub name, or a demo name (``demo:tiny-dino``).

    Raises:
        UserError: there is no such encoder, its kind is unknown, or it has no safetensors.
    """
    place = _folder(name)
    kind, parameters = KINDS[_model_type(place)][0], _parameters(place)
    return About(name, place.folder, kind, fingerprint(place.folder), parameters)


def load_encoder(about: About, device: torch.device) -> Encoder:
    """Load an encoder.

    Raises:
        UserError: its folder is damaged.
    """
    return class_of(about)(about, device)


def class_of(about: About) -> type[Encoder]:
    """The class of an encoder."""
    return KINDS[_model_type(folder_of(about))][1]


def _folder(name: str) -> ModelFolder:
    if name.startswith("demo:"):
        if name not in ENCODERS:
            raise UserError(f"--encoders: {name}: unknown demo name. Use one of {', '.join(ENCODERS)}")
        return ModelFolder(ENCODERS[name], "--encoders", "encoder")
    return find_folder(name, "--encoders", "encoder", "facebook/dino-vits16")


def _model_type(place: ModelFolder) -> str:
    found = place.config().get("model_type")
    if not isinstance(found, str) or found not in KINDS:
        raise UserError(
            f"--encoders: {place.folder} is a {found} model. Use one of {', '.join(KINDS)}, such as "
            "facebook/dino-vits16 or openai/clip-vit-large-patch14"
        )
    return found


def _parameters(place: ModelFolder) -> int:
    """Count the weights in the headers of a folder's files.

    Raises:
        UserError: there are only pickles, or a file is damaged.
    """
    place.refuse_pickles()
    headers = [read_header(file) for file in weight_files(place.folder)]
    shapes = [entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"]
    return sum(math.prod(shape) for shape in shapes)
