"""Find the weight files of a model folder in diffusers' layout, fingerprint it, and write one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.system import strict_json
from simpletune.system.atomic import atomic_folder
from simpletune.system.checksums import hash_content
from simpletune.system.options import UserError
from simpletune.system.regular_files import read_regular
from simpletune.system.safetensors_file import write_safetensors

if TYPE_CHECKING:
    from torch import Tensor, nn

INDEX_BYTES, INDEX_VALUES = 16 * 2**20, 200_000  # limits of a shard index; T5's lists 219 tensors
NAMES = ("diffusion_pytorch_model", "model")
HALF = ".fp16"
"""Before the suffix of files in half precision, beside those in full or, in few repositories, instead of them."""


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model folder: one file, in half precision if there is no other, or the shards
    that an index names. Raises UserError if the folder has no weights, or a shard is missing."""
    for name in NAMES:
        index, single = folder / f"{name}.safetensors.index.json", folder / f"{name}.safetensors"
        if index.exists():
            shards = _shards(index)
            missing = [shard.name for shard in shards if not shard.is_file()]
            if missing:
                raise UserError(f"{folder} lacks {', '.join(missing)}, named by {index.name}. Download them again")
            return shards
        if single.is_file():
            return [single]
        if single.exists():
            raise UserError(f"{single} is not a regular file. Download it again")
    halves = [folder / f"{name}{HALF}.safetensors" for name in NAMES]
    if half := next((file for file in halves if file.is_file()), None):
        return [half]
    found = ", ".join(sorted(file.name for file in folder.glob("*"))) or "nothing"
    raise UserError(
        f"{folder} contains neither {NAMES[0]}.safetensors nor {NAMES[1]}.safetensors, but {found}. Download the model "
        "in diffusers' layout"
    )


def variant_of(folder: Path) -> str | None:
    """Return diffusers' name for what ``weight_files`` lists: ``fp16``, or None for the usual files."""
    return HALF.removeprefix(".") if weight_files(folder)[0].stem.endswith(HALF) else None


def _shards(index: Path) -> list[Path]:
    """List the files that an index names, which must be in its own folder."""
    try:
        found: Any = strict_json.read(index, INDEX_BYTES, INDEX_VALUES)
        names = sorted(set(found["weight_map"].values()))
        away = [name for name in names if name != Path(name).name or name in ("", ".", "..")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}). Download it again") from None
    if away:
        raise UserError(
            f"{index} names {away[0]!r}, which is outside its folder. It was not read; use another copy of the model"
        )
    return [index.with_name(name) for name in names]


def fingerprint(folder: Path, sums: Path | None = None) -> str:
    """Compute a fingerprint of the contents of a model folder: of its configs and weight files, wherever it lies.
    ``sums`` as for ``hash_content``."""
    digest = hashlib.sha256()
    for config in sorted(folder.glob("*.json")):
        if not config.name.endswith(".index.json"):
            digest.update(config.name.encode() + read_regular(config, INDEX_BYTES))
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        hash_content(digest, file, [(0, size)], sums)
    return digest.hexdigest()[:16]


def files_hash(folder: Path) -> str:
    """Compute a short hash of all files in a folder of small ones, such as a tokenizer's."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(file.name.encode())
            with open(file, "rb") as stream:
                while part := stream.read(2**20):
                    digest.update(part)
    return digest.hexdigest()[:8]


def write_model_folder(
    model: nn.Module, folder: Path, metadata: dict[str, str], instead: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a diffusers model as a folder for ``from_pretrained``: config.json and one safetensors file, in which
    ``instead`` replaces the model's own tensors of the same names."""
    with atomic_folder(folder) as part:
        model.save_config(part)  # type: ignore[operator]
        write_safetensors({**model.state_dict(), **(instead or {})}, part / f"{NAMES[0]}.safetensors", metadata)
    return folder
