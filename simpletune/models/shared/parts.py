"""Locate and load one part of a pipeline, from a folder in diffusers' layout or from a single file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.models.shared.model_config import ModelConfig, read_config
from simpletune.models.shared.single_file import FileLayout, SingleFile, open_file
from simpletune.system.model_folder import files_hash, fingerprint, variant_of, weight_files
from simpletune.system.options import UserError, join_names
from simpletune.system.safetensors_file import read_header

if TYPE_CHECKING:
    import torch
    from torch import Tensor


OLD_ATTENTION = re.compile(r"(?<=\.attentions\.\d\.)(query|key|value|proj_attn)(?=\.)")
NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass(frozen=True)
class Part:
    """The location of a part's configuration and weights."""

    name: str  # ``vae``, ``text_encoder``, ``tokenizer_2``, ``scheduler``, ...
    folder: Path | None  # the folder of its files; None uses the bundled configuration
    file: Path | None = None  # the single file with the weights; None if they are in the folder
    layout: FileLayout | None = None
    bundled: ModelConfig | None = None  # the configuration of a part without a folder, which ships with this package
    changes: ModelConfig | None = None  # to the configuration, by options

    @property
    def place(self) -> str:
        """The location of the weights, for messages."""
        return f"{self.name} in {self.file}" if self.file else str(self.folder)

    def single_file(self) -> SingleFile:
        """Return the single file with the weights. Raises UserError if it is damaged."""
        assert self.file is not None and self.layout is not None
        return open_file(self.file, self.layout)

    def config(self) -> ModelConfig:
        """Read the part's ``config.json`` (the scheduler's ``scheduler_config.json``), or return the bundled one.
        Raises UserError if it cannot be read, or contains a size beyond the limits."""
        if self.folder is None:
            assert self.bundled is not None
            return {**self.bundled, **(self.changes or {})}
        file = self.folder / ("scheduler_config.json" if self.name == "scheduler" else "config.json")
        return {**read_config(file, self.name), **(self.changes or {})}

    def fingerprint(self, sums: Path | None = None) -> str:
        """Return a short hash of the part's configuration and of every byte of its weights, the same wherever they lie:
        what caches and checkpoints know it by. ``sums``: the cache that keeps checksums of large files, if any."""
        if self.name.startswith("tokenizer"):
            assert self.folder is not None  # single files never contain tokenizers
            return files_hash(self.folder)
        import hashlib

        if self.name != "scheduler" and self.file is None:
            assert self.folder is not None
            unchanged = fingerprint(self.folder, sums)
            more = json.dumps(self.changes, sort_keys=True)
            return hashlib.sha256((unchanged + more).encode()).hexdigest()[:16] if self.changes else unchanged

        is_denoiser = self.layout is not None and self.name == self.layout.denoiser
        config = json.dumps(self.single_file().denoiser_config if is_denoiser else self.config(), sort_keys=True)
        weights = "" if self.file is None else self.single_file().fingerprint(self.name, sums)
        return hashlib.sha256((config + weights).encode()).hexdigest()[:16]


@contextmanager
def explain_load_errors(part: Part) -> Iterator[None]:
    """Raise UserError for an exception while a part is built or read: its files are damaged, or do not match."""
    from huggingface_hub.errors import StrictDataclassError

    odd = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
    try:
        yield
    except (*odd, StrictDataclassError) as error:
        said = str(error).strip().partition("\n")[0][:300]
        raise UserError(
            f"{part.place} cannot be loaded ({type(error).__name__}: {said}). Its files are damaged or do not match "
            "each other. Download it again"
        ) from error


def only_local(part: Part) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` to read the safetensors of a part's folder."""
    assert part.folder is not None
    return {"local_files_only": True, "use_safetensors": True, "variant": variant_of(part.folder)}


def require_weights(part: Part, expected: Mapping[str, torch.Size], prefix: str = "") -> None:
    """Compare the names and shapes in a folder's headers with its configuration's before allocating anything. Names may
    have the prefix in the file, but not in the model: transformers 5 no longer writes it. diffusers renames attention
    layers that its older versions wrote, as in the published autoencoders of SD 1.5 and 2."""
    assert part.folder is not None
    headers = [read_header(file) for file in weight_files(part.folder)]
    entries = [
        (OLD_ATTENTION.sub(lambda match: NEW_ATTENTION[match[1]], name.removeprefix(prefix)), entry)
        for header in headers
        for name, entry in header.items()
    ]
    found = {name: tuple(entry["shape"]) for name, entry in entries if name in expected}
    require_tensor_shapes(part, expected, found)


def tensor_shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def require_tensor_shapes(part: Part, expected: Mapping[str, torch.Size], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the names and shapes in the file with those in the configuration. Raises UserError if they differ."""
    missing, odd = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    sized = [key for key in expected if key in found and found[key] != expected[key]]
    kinds = {"missing": missing, "unexpected": odd, "wrong shape": sized}
    listed = [f"{title}: {join_names(names)}" for title, names in kinds.items() if names]
    if listed:
        of_file = "Set model.text_encoders to a folder with the file's own configurations"
        remedy = of_file if part.file else "Download it again"
        raise UserError(
            f"{part.place} does not match its configuration ({part.folder or 'bundled'}). {'; '.join(listed)}. {remedy}"
        )
