"""A model's folder in diffusers' layout: which weight files it holds, a fingerprint of it, and writing one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.options import UserError
from simpletune.system import strict_json
from simpletune.system.atomic import atomic_folder
from simpletune.system.checksums import hash_samples
from simpletune.system.safetensors_file import write_safetensors

if TYPE_CHECKING:
    from torch import Tensor, nn

INDEX_BYTES, INDEX_VALUES = 16 * 2**20, 200_000  # of a shard index; T5's names 219 tensors
NAMES = ("diffusion_pytorch_model", "model")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of one model folder (one file, or the shards that an index names).

    Raises:
        UserError: there are none, or a shard is missing.
    """
    for name in NAMES:
        index, single = folder / f"{name}.safetensors.index.json", folder / f"{name}.safetensors"
        if index.exists():
            shards = _shards(index)
            missing = [shard.name for shard in shards if not shard.exists()]
            if missing:
                raise UserError(f"{folder}: {', '.join(missing)} missing, named by {index.name}. Download them again")
            return shards
        if single.exists():
            return [single]
    found = ", ".join(sorted(file.name for file in folder.glob("*"))) or "nothing"
    raise UserError(f"{folder} holds no {NAMES[0]}.safetensors and no {NAMES[1]}.safetensors, but {found}")


def _shards(index: Path) -> list[Path]:
    """The files that an index names, all of them in its own folder.

    Raises:
        UserError: it names others, or is no index.
    """
    try:
        found: Any = strict_json.read(index, INDEX_BYTES, INDEX_VALUES)
        names = sorted(set(found["weight_map"].values()))
        away = [name for name in names if name != Path(name).name or name in ("", ".", "..")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}). Fetch it again") from None
    if away:
        raise UserError(
            f"{index} names {away[0]!r}, which leads out of its folder. Nothing there is read; get the model elsewhere"
        )
    return [index.with_name(name) for name in names]


@lru_cache(maxsize=32)
def fingerprint(folder: Path) -> str:
    """A short name for a model folder's content: its config and samples from all over its weight files.

    64 chunks of 64 KiB a file stand for the whole, so that 10 GB take no longer than 10 MB.
    """
    digest = hashlib.sha256()
    for config in sorted(folder.glob("*.json")):
        if not config.name.endswith(".index.json"):
            digest.update(config.name.encode() + config.read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        hash_samples(digest, file, 0, size)
    return digest.hexdigest()[:16]


def write_model_folder(
    model: nn.Module, folder: Path, metadata: dict[str, str], instead: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a diffusers model as a folder that ``from_pretrained`` loads: config.json and one safetensors file.

    Args:
        instead: tensors to write in the place of the model's own of the same names.
    """
    with atomic_folder(folder) as part:
        model.save_config(part)  # type: ignore[operator]
        write_safetensors({**model.state_dict(), **(instead or {})}, part / f"{NAMES[0]}.safetensors", metadata)
    return folder
