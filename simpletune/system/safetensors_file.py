"""safetensors files: the header without the weights, reading tensor by tensor, writing whole or tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from simpletune.options import UserError, shortened
from simpletune.system.atomic import atomic_file
from simpletune.system.failpoints import failpoint

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SafetensorsType:
    """A type of the format's.

    Args:
        bytes: of one number.
        torch: the type's name in torch.
        struct: its code in ``struct``; BF16: that of F32, whose upper half it is. None: ``struct`` has none.
        exponent: of a floating-point type, the bits of the exponent; a number is not finite when all are set.
        magnitude: of a floating-point type, the bits without the sign.
    """

    bytes: int
    torch: str
    struct: str | None = None
    exponent: int = 0
    magnitude: int = 0


TYPES = {
    "F64": SafetensorsType(8, "float64", "<d", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": SafetensorsType(4, "float32", "<f", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": SafetensorsType(2, "float16", "<e", 0x7C00, 0x7FFF),
    "BF16": SafetensorsType(2, "bfloat16", "<f", 0x7F80, 0x7FFF),
    "F8_E5M2": SafetensorsType(1, "float8_e5m2", None, 0x7C, 0x7F),
    "F8_E4M3": SafetensorsType(1, "float8_e4m3fn", None, 0x7F, 0x7F),  # NaN alone; it has no infinity
    "I64": SafetensorsType(8, "int64", "<q"),
    "I32": SafetensorsType(4, "int32", "<i"),
    "I16": SafetensorsType(2, "int16", "<h"),
    "I8": SafetensorsType(1, "int8", "<b"),
    "U8": SafetensorsType(1, "uint8", "<B"),
    "BOOL": SafetensorsType(1, "bool", "<?"),
}


def bytes_of(kind: str) -> int:
    """Bytes of one number; 1 for a type that is not known, as all the newer ones have."""
    return TYPES[kind].bytes if kind in TYPES else 1


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
    kind = TYPES.get(entry["dtype"])
    if kind is not None and end - begin != math.prod(entry["shape"]) * kind.bytes:
        raise ValueError
    return end


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

    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in host.values())
    with atomic_file(file, size, shared=True) as part:
        save_file(host, part, {"format": "pt", **metadata})
        failpoint("file.before-rename")
    failpoint("file.after-rename")
    return file


class SafetensorsWriter:
    """A file that appears when the last tensor is written and the context is left without an error.

    Args:
        file: where to.
        entries: names, each with its safetensors type (``BF16``) and shape.
        metadata: strings for the header.
    """

    def __init__(self, file: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]):
        self._file = file
        self._entries: dict[str, Any] = {}
        offset = 0
        for name, (kind, shape) in sorted(entries.items(), key=lambda entry: (-bytes_of(entry[1][0]), entry[0])):
            end = offset + bytes_of(kind) * math.prod(shape)
            self._entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        header = {"__metadata__": dict(metadata), **self._entries} if metadata else self._entries
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start, self._open = 8 + len(text), set(self._entries)
        self.size = self._start + offset
        self._head = len(text).to_bytes(8, "little") + text

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, cast to its entry's type; in any order, each once.

        Raises:
            ValueError: the shape is not that of the entry, or it was written before.
        """
        import torch

        entry = self._entries[name]
        if list(tensor.shape) != entry["shape"] or name not in self._open:
            raise ValueError(f"{name}: {list(tensor.shape)} cannot be written as {entry}")
        plain = tensor.detach().to("cpu", getattr(torch, TYPES[entry["dtype"]].torch)).contiguous()
        self.write_bytes(name, plain.flatten().view(torch.uint8).numpy().data)

    def write_bytes(self, name: str, data: Any) -> None:
        """Write one tensor's bytes as they are."""
        begin, end = self._entries[name]["data_offsets"]
        if len(data) != end - begin:
            raise ValueError(f"{name}: {len(data)} bytes where {end - begin} belong")
        self._handle.seek(self._start + begin)
        self._handle.write(data)
        self._open.remove(name)

    def __enter__(self) -> SafetensorsWriter:
        with ExitStack() as stack:
            part = stack.enter_context(atomic_file(self._file, self.size, shared=True))
            self._handle = stack.enter_context(open(part, "wb"))
            self._handle.write(self._head)
            self._contexts = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._open:
            unwritten = ValueError(f"never written: {shortened(sorted(self._open), 4)}")
            self._contexts.__exit__(ValueError, unwritten, None)
            raise unwritten
        self._contexts.__exit__(kind, error, trace)
