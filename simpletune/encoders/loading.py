"""Find an encoder by folder or hub name, and load it."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import torch

from simpletune.demo import ENCODERS
from simpletune.encoders.clip import Clip
from simpletune.encoders.dino import Dino, Dino2
from simpletune.encoders.encoder import About, Encoder
from simpletune.encoders.siglip import Siglip
from simpletune.hub.fetch import is_hub_name
from simpletune.hub.files import model_folder
from simpletune.options import UserError
from simpletune.system import strict_json
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

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find_encoder(name: str, option: str = "--encoders", kinds: Collection[str] = ()) -> About:
    """Find an encoder and read its configuration; load no weights.

    Args:
        name: a folder, a hub name, or a demo name (``demo:tiny-dino``).
        option: that named it, for messages.
        kinds: that the option takes, as in `KINDS`; none: all.

    Raises:
        UserError: there is no such encoder, its kind is unknown or not taken, or it has no safetensors.
    """
    folder = _folder(name, option)
    kind = KINDS[_model_type(folder, option)][0]
    if kinds and kind not in kinds:
        raise UserError(f"{option}: {name} is a {kind} model. Use one of {', '.join(kinds)}")
    parameters = _parameters(folder, option)
    return About(name, folder, kind, fingerprint(folder), parameters, option)


def load_encoder(about: About, device: torch.device) -> Encoder:
    """Load an encoder.

    Raises:
        UserError: its folder is damaged.
    """
    return class_of(about)(about, device)


def class_of(about: About) -> type[Encoder]:
    """The class of an encoder."""
    return KINDS[_model_type(about.folder, about.option)][1]


def _folder(name: str, option: str) -> Path:
    folder = Path(name)
    if name.startswith("demo:"):
        if name not in ENCODERS:
            raise UserError(f"{option}: {name}: unknown demo name. Use one of {', '.join(ENCODERS)}")
        return ENCODERS[name]
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            held = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
            raise UserError(
                f"{option}: {folder} has no config.json, only {held}. Name a folder of transformers' layout"
            )
        return folder
    if is_hub_name(name):
        return model_folder(name)
    raise UserError(f"{option}: {name} does not exist. Give a folder or a hub name, such as facebook/dino-vits16")


def _model_type(folder: Path, option: str) -> str:
    try:
        config = strict_json.read(folder / "config.json")
    except (OSError, strict_json.JsonError) as error:
        raise UserError(f"{option}: {folder / 'config.json'} is damaged ({error}). Download it again") from None
    found = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(found, str) or found not in KINDS:
        raise UserError(
            f"{option}: {folder} is a {found} model. Use one of {', '.join(KINDS)}, such as facebook/dino-vits16 or "
            "openai/clip-vit-large-patch14"
        )
    return found


def _parameters(folder: Path, option: str) -> int:
    """Count the weights in the headers of a folder's files.

    Raises:
        UserError: there are only pickles, or a file is damaged.
    """
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{option}: {folder} has only {', '.join(pickles)}. A pickle can run code when it is read: use a copy "
            "with model.safetensors"
        )
    headers = [read_header(file) for file in weight_files(folder)]
    shapes = [entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"]
    return sum(math.prod(shape) for shape in shapes)
