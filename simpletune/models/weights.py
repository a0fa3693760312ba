"""Weight files: safetensors folders read tensor by tensor, fingerprints of what they hold, and writing them whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.options import UserError
from simpletune.system.atomic import own_place, remove
from simpletune.system.disk import room_for
from simpletune.system.failpoints import passed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

NAMES = ("diffusion_pytorch_model", "model")
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # bytes
SAMPLED_CHUNKS, CHUNK = 64, 65536


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
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        away = [name for name in names if name != Path(name).name or name in ("", ".", "..")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}). Fetch it again") from None
    if away:
        raise UserError(
            f"{index} names {away[0]!r}, which leads out of its folder. Nothing there is read; get the model elsewhere"
        )
    return [index.with_name(name) for name in names]


def read_header(file: Path) -> dict[str, Any]:
    """A safetensors file's header: names to types, shapes and offsets, and ``__metadata__``.

    Raises:
        UserError: it is no safetensors file, or it is cut short.
    """
    try:
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= 100_000_000:
                raise ValueError
            header = json.loads(handle.read(length))
        entries = [value for name, value in header.items() if name != "__metadata__"]
        size = 8 + length + max((_end(entry) for entry in entries), default=0)
        about = header.get("__metadata__") or {}
        if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError(f"{file} is not a safetensors file, or it is damaged. Fetch it again") from None
    if file.stat().st_size < size:
        raise UserError(f"{file} is cut short: {file.stat().st_size:,} of {size:,} bytes. Fetch it again")
    return header


def _end(entry: Any) -> int:
    """Where the bytes of a header's entry end.

    Raises:
        ValueError: it is none.
    """
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if not isinstance(entry["dtype"], str) or any(type(n) is not int or n < 0 for n in numbers) or end < begin:
        raise ValueError
    wide = WIDTHS.get(entry["dtype"])
    if wide is not None and end - begin != math.prod(entry["shape"]) * wide:
        raise ValueError
    return end


def sha256_of(file: Path) -> str:
    """The checksum of a whole file, in hexadecimal."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


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
        _hash_samples(digest, file, 0, size)
    return digest.hexdigest()[:16]


def fingerprint_of_range(file: Path, about: str, start: int, end: int) -> str:
    """A short name for the bytes from ``start`` to ``end`` of a file, sampled as ``fingerprint`` does.

    Args:
        about: what else counts: names, types, shapes.
    """
    digest = hashlib.sha256(f"{about}:{end - start}".encode())
    _hash_samples(digest, file, start, end)
    return digest.hexdigest()[:16]


def _hash_samples(digest: Any, file: Path, start: int, end: int) -> None:
    """Chunks from all over a part of a file."""
    size = end - start
    with open(file, "rb") as handle:
        for number in range(SAMPLED_CHUNKS):
            handle.seek(start + number * max(size - CHUNK, 0) // (SAMPLED_CHUNKS - 1))
            digest.update(handle.read(min(CHUNK, size)))
            if size <= CHUNK:
                break


class WeightReader:
    """Random access to the tensors of a model folder; files are memory-mapped, so only what is asked for is read.

    Args:
        files: safetensors files.
    """

    def __init__(self, files: list[Path]):
        from safetensors import safe_open

        for file in files:
            read_header(file)
        self._files = [safe_open(file, framework="pt") for file in files]
        self._owner = {name: handle for handle in self._files for name in handle.keys()}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._owner)

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the type it has on disk."""
        return self._owner[name].get_tensor(name)

    def get_all(self) -> dict[str, Tensor]:
        """Every tensor, on the CPU."""
        return {name: self.get(name) for name in sorted(self._owner)}


def write_safetensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str]) -> Path:
    """Write tensors aside, flush them to disk, and rename: the file is whole or it is not there.

    Args:
        tensors: by name; any device, any layout.
        file: where to.
        metadata: strings for the header.
    """
    from safetensors.torch import save_file

    aside = own_place(file)
    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in host.values())
    with room_for(f"writing {file.name}", file.parent, size, lambda: aside.unlink(missing_ok=True)):
        save_file(host, aside, {"format": "pt", **metadata})
        flush_to_disk(aside)
        passed("file.before-rename")
        os.replace(aside, file)
    passed("file.after-rename")
    return file


def write_model_folder(
    model: nn.Module, folder: Path, metadata: dict[str, str], instead: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a diffusers model as a folder that ``from_pretrained`` loads: config.json and one safetensors file.

    Args:
        instead: tensors to write in the place of the model's own of the same names.
    """
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    with room_for(f"writing {folder.name}/", folder.parent, undo=lambda: shutil.rmtree(aside, ignore_errors=True)):
        aside.mkdir(parents=True)
        model.save_config(aside)  # type: ignore[operator]
        write_safetensors({**model.state_dict(), **(instead or {})}, aside / f"{NAMES[0]}.safetensors", metadata)
        replace_folder(aside, folder)
    return folder


def replace_folder(aside: Path, folder: Path) -> None:
    """Put a finished folder in the place of an older one, which is removed last: a kill loses neither."""
    old = folder.with_name(f".{folder.name}.old.part")
    remove(old)
    if folder.exists():
        os.replace(folder, old)
    os.replace(aside, folder)
    remove(old)


def set_aside(place: Path) -> Path:
    """Rename what is damaged, so that it can be looked at and is not read again; an older one makes room.

    Returns:
        Its new name.
    """
    aside = place.with_name(f"{place.name}.damaged")
    if aside.is_dir():
        shutil.rmtree(aside)
    os.replace(place, aside)
    return aside


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_tensor(module: nn.Module, name: str, tensor: Tensor, *, requires_grad: bool = False) -> None:
    """Put a tensor in the place of a module's own parameter or buffer."""
    from torch import nn

    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=requires_grad)
    else:
        module._buffers[name] = tensor


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers, without those of its children."""
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in own if tensor is not None]


def all_tensors(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by the model's own names."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or the plain ones that a subclass is made of (a quantised weight: its integers and its scales)."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def move_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move a module's own frozen tensors, without those of its children (which may not be loaded yet)."""
    for name, tensor in own_tensors(module):
        set_tensor(module, name, tensor.detach().to(device))


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of its own on a device: never a view of a memory-mapped file."""
    return tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True)
