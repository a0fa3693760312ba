"""The prepared cache: latents and prompt embeddings in small safetensors files named after what they were made of.

A file's name is the hash of everything its content depends on, so a changed caption or picture makes a new file, and
nothing can pair a picture with another's caption. Files are written aside and renamed: a killed run leaves whole files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.data.plan import View
from simpletune.models.weights import write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

LATENTS_VERSION = 2  # raise when the cut of a picture or its encoding changes


class Cache:
    """One folder of tensors by content.

    Args:
        folder: where files lie; its name tells the encoder that made them.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, key: str) -> Path:
        """Where the tensors of a key lie."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / f"{name}.safetensors"

    def __contains__(self, key: str) -> bool:
        return self.file(key).exists()

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors under a key; the key itself stands in the file's header."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(tensors, self.file(key), {"key": key})

    def load(self, key: str) -> dict[str, Tensor]:
        """The tensors of a key.

        Raises:
            FileNotFoundError: never made, or removed.
            ValueError: the file was made for another key.
        """
        from safetensors import safe_open

        file = self.file(key)
        with safe_open(file, framework="pt") as handle:
            if handle.metadata().get("key") != key:
                raise ValueError(f"{file} was made for another key: remove it and start again")
            return {name: handle.get_tensor(name) for name in handle.keys()}


def view_key(view: View) -> str:
    """What a picture's latents depend on, beside the autoencoder."""
    cut = {"bucket": view.bucket, "offset": view.offset, "flip": view.flip, "version": LATENTS_VERSION}
    return json.dumps({"sha256": view.picture.digest, **cut}, sort_keys=True)
