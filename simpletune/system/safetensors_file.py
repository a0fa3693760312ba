"""Read headers and single tensors of safetensors files, and write files at once or tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from simpletune.system.atomic import atomic_file
from simpletune.system.options import UserError, join_names
from simpletune.system.regular_files import open_regular
from simpletune.system.shell import quote_command

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SafetensorsType:
    """A data type of the format."""

    bytes: int  # per number
    torch: str  # name of the type in torch
    struct: str | None = None  # code in ``struct``; BF16 has the code of F32, whose upper half it is
    exponent: int = 0  # exponent bits of a floating-point type; a number is non-finite if all are set
    magnitude: int = 0  # bits of a floating-point type without the sign


NO_HASH = f"0x{'0' * 64}"
TYPES = {
    "F64": SafetensorsType(8, "float64", "<d", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": SafetensorsType(4, "float32", "<f", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": SafetensorsType(2, "float16", "<e", 0x7C00, 0x7FFF),
    "BF16": SafetensorsType(2, "bfloat16", "<f", 0x7F80, 0x7FFF),
    "F8_E5M2": SafetensorsType(1, "float8_e5m2", None, 0x7C, 0x7F),
    "F8_E4M3": SafetensorsType(1, "float8_e4m3fn", None, 0x7F, 0x7F),  # NaN only; the type has no infinity
    "I64": SafetensorsType(8, "int64", "<q"),
    "I32": SafetensorsType(4, "int32", "<i"),
    "I16": SafetensorsType(2, "int16", "<h"),
    "I8": SafetensorsType(1, "int8", "<b"),
    "U8": SafetensorsType(1, "uint8", "<B"),
    "BOOL": SafetensorsType(1, "bool", "<?"),
}


def fp8_value(byte: int, kind: str) -> float:
    """Return the value of a number in F8_E4M3 or F8_E5M2 (arXiv:2209.05433, table 1); NaN and infinities included."""
    if kind == "F8_E5M2":  # the upper byte of a half
        return float(struct.unpack("<e", bytes((0, byte)))[0])
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -value if byte & 128 else value


OTHER_TYPES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16", "U32", "U64", "C64")
"""Types that the format has, and this package does not read."""
INDEX_SUFFIX = ".shards.json"
PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")


CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; "
    'found = torch.load(sys.argv[1], map_location="cpu", weights_only=True); found = found.get("state_dict", found); '
    "save_file({k: v.clone().contiguous() for k, v in found.items() if torch.is_tensor(v)}, sys.argv[2])"
)
"""Rewrites a pickle's tensors; ``weights_only`` refuses a pickle that would run code."""


def conversion_command(file: Path) -> str:
    """Return the command that rewrites a pickle's tensors as safetensors and runs no code of the file."""
    out = file.with_suffix(".safetensors")
    out = file.with_name(f"{file.stem}-converted.safetensors") if out == file else out
    return quote_command("python", "-c", CONVERT, file, out)


def require_safetensors(file: Path) -> None:
    """Refuse missing files and files in other formats, above all pickles. Raises UserError, which names the format."""
    if not file.is_file():
        missing = "is not a regular file" if file.exists() else "does not exist"
        raise UserError(f"{file} {missing}. Give a .safetensors file")
    try:
        with open_regular(file) as handle:
            start = handle.read(9)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error})") from None
    protocols = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    has_header = start[4:] == b"\0\0\0\0{"  # of safetensors, whose length may begin with the same bytes
    pickled = start[:2] in protocols and not has_header or start[:4] == b"PK\x03\x04"
    if file.suffix in PICKLES or pickled:
        raise UserError(
            f"{file} is a pickle file ({file.suffix or 'by its first bytes'}), which is never opened because loading "
            f"one can run arbitrary code. Get the .safetensors version, or convert it: {conversion_command(file)}"
        )
    if start[:4] == b"GGUF":
        raise UserError(f"{file} is a GGUF file, which is not supported. Get the .safetensors version")


def read_header(file: Path, most: int | None = None) -> dict[str, Any]:
    """Read a safetensors header: types, shapes and offsets by name, and ``__metadata__``; of at most ``most`` tensors.
    Raises UserError if the file is not a safetensors file, is damaged or is truncated."""
    try:
        with open_regular(file) as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= 100_000_000:
                raise ValueError
            text = handle.read(length)
        count = text.count(b'"data_offsets"')  # before it is parsed, which takes longer
        if most is not None and count > most:
            raise UserError(f"{file} has {count:,} tensors; the limit is {most:,}")
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        size = 8 + length
        for entry in (value for name, value in header.items() if name != "__metadata__"):
            begin, end = entry["data_offsets"]
            numbers = [begin, end, *entry["shape"]]
            if not isinstance(entry["dtype"], str) or any(type(n) is not int or n < 0 for n in numbers) or end < begin:
                raise ValueError
            kind = TYPES.get(entry["dtype"])
            if kind is None and entry["dtype"] not in OTHER_TYPES:
                raise ValueError
            if kind is not None and end - begin != math.prod(entry["shape"]) * kind.bytes:
                raise ValueError
            size = max(size, 8 + length + end)
        places = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        if any(begin != end for (_, end), (begin, _) in pairwise([[0, 0], *places])):
            raise ValueError  # gaps, or tensors that overlap
        about = header.get("__metadata__") or {}
        if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError(f"{file} is damaged or not a safetensors file. Download it again") from None
    if file.stat().st_size < size:
        raise UserError(f"{file} is truncated: {file.stat().st_size:,} of {size:,} bytes. Download it again")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError
    return found


class WeightReader:
    """A reader of single tensors from memory-mapped files, which loads only the requested ones.

    Args:
        files: safetensors files, and indices (``.shards.json``) of files that each hold some rows of every tensor.
    """

    def __init__(self, files: list[Path]):
        from safetensors import safe_open

        self._owners: dict[str, list[Any]] = {}  # the files with a tensor's rows, in order
        for file in files:
            found: dict[str, list[Any]] = {}
            for part in files_of_index(file) if file.name.endswith(INDEX_SUFFIX) else [file]:
                read_header(part)
                handle = safe_open(part, framework="pt")
                for name in handle.keys():
                    found.setdefault(name, []).append(handle)
            self._owners |= found

    @property
    def names(self) -> set[str]:
        return set(self._owners)

    def get(self, name: str) -> Tensor:
        """Load one tensor to the CPU, in its type on disk."""
        parts: list[Tensor] = [handle.get_tensor(name) for handle in self._owners[name]]
        return _join(parts)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Load the rows ``first`` to ``last - 1`` of one tensor to the CPU."""
        parts: list[Tensor] = []
        for handle in self._owners[name]:
            part = handle.get_slice(name)
            count = part.get_shape()[0]
            if first < count and last > 0:
                parts.append(part[max(first, 0) : min(last, count)])
            first, last = first - count, last - count
        return _join(parts)

    def get_all(self) -> dict[str, Tensor]:
        """Load all tensors to the CPU."""
        return {name: self.get(name) for name in sorted(self._owners)}


def _join(parts: list[Tensor]) -> Tensor:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts)


def files_of_index(index: Path) -> list[Path]:
    """List the files that an index of shards names, which must be in its own folder."""
    try:
        names = [str(each["file"]) for each in json.loads(index.read_text(encoding="utf-8"))["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}). Use another checkpoint") from None
    if any(name != Path(name).name or name in ("", ".", "..") for name in names):
        raise UserError(f"{index} names files outside its folder. It was not read; use another checkpoint")
    return [index.with_name(name) for name in names]


def write_safetensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str], hashed: str | None = None
) -> Path:
    """Write tensors, on any device and in any layout, to a safetensors file atomically.

    Args:
        metadata: strings for the header.
        hashed: name of a header string to set to the SHA-256 of everything after the header.
    """
    from safetensors.torch import save_file

    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in host.values())
    with atomic_file(file, size, shared=True) as part:
        save_file(host, part, {"format": "pt", **metadata, **({hashed: NO_HASH} if hashed else {})})
        _sort_metadata(part, {hashed: content_hash(part)} if hashed else {})
    return file


def content_hash(file: Path) -> str:
    """Return ``0x`` and the SHA-256 of everything after a file's header, as the model spec defines ``hash_sha256``."""
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        handle.seek(8 + int.from_bytes(handle.read(8), "little"))
        while chunk := handle.read(2**20):
            digest.update(chunk)
    return f"0x{digest.hexdigest()}"


def _sort_metadata(file: Path, changes: Mapping[str, str]) -> None:
    """Sort the header's strings, with ``changes`` that are no longer than what they replace.

    The library writes them in a different order each time; sorting them makes files with equal content equal.
    """
    with open(file, "r+b") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
        header["__metadata__"] = dict(sorted({**header["__metadata__"], **changes}.items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise ValueError(f"{file}: the header has {len(text)} bytes, but room for {length}")
        handle.seek(8)
        handle.write(text.ljust(length))


class SafetensorsWriter:
    """Write a file tensor by tensor; it appears once all are written and the context exits without an error.

    ``entries`` are safetensors type (such as ``BF16``) and shape by name, ``metadata`` strings for the header.
    """

    def __init__(self, file: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]):
        self._file = file
        self._entries: dict[str, Any] = {}
        # bytes per number; 1 for unknown types, as in all newer ones
        widths = {name: TYPES[kind].bytes if kind in TYPES else 1 for name, (kind, _) in entries.items()}
        offset = 0
        for name in sorted(entries, key=lambda name: (-widths[name], name)):
            kind, shape = entries[name]
            end = offset + widths[name] * math.prod(shape)
            self._entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        header = {"__metadata__": dict(metadata), **self._entries} if metadata else self._entries
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start, self._open = 8 + len(text), set(self._entries)
        self.size = self._start + offset
        self._head = len(text).to_bytes(8, "little") + text

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, cast to its entry's type; in any order, each one once. Raises ValueError if the shape
        differs from the entry's, or the tensor was already written."""
        import torch

        entry = self._entries[name]
        if list(tensor.shape) != entry["shape"] or name not in self._open:
            raise ValueError(f"{name}: {list(tensor.shape)} cannot be written as {entry}")
        plain = tensor.detach().to("cpu", getattr(torch, TYPES[entry["dtype"]].torch)).contiguous()
        self.write_bytes(name, plain.flatten().view(torch.uint8).numpy().data)

    def write_bytes(self, name: str, data: Any) -> None:
        """Write the raw bytes of one tensor."""
        begin, end = self._entries[name]["data_offsets"]
        if len(data) != end - begin:
            raise ValueError(f"{name}: {len(data)} bytes instead of {end - begin}")
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
            unwritten = ValueError(f"never written: {join_names(sorted(self._open), 4)}")
            self._contexts.__exit__(ValueError, unwritten, None)
            raise unwritten
        self._contexts.__exit__(kind, error, trace)
