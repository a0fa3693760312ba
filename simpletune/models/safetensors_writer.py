"""Writing a safetensors file tensor by tensor: the header first, from shapes and types alone; one tensor in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from simpletune.models.weights import flush_to_disk
from simpletune.system.atomic import own_place

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # all others: 1
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsWriter:
    """A file that appears when the last tensor is written and the context is left without an error.

    Args:
        file: where to.
        entries: names, each with its safetensors type (``BF16``) and shape.
        metadata: strings for the header.
    """

    def __init__(self, file: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]):
        self._file, self._aside = file, own_place(file)
        self._entries: dict[str, Any] = {}
        offset = 0
        for name, (kind, shape) in sorted(entries.items(), key=lambda entry: (-BYTES.get(entry[1][0], 1), entry[0])):
            end = offset + BYTES.get(kind, 1) * math.prod(shape)
            self._entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        header = {"__metadata__": dict(metadata), **self._entries} if metadata else self._entries
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start, self._open = 8 + len(text), set(self._entries)
        self.size = self._start + offset
        self._handle = open(self._aside, "wb")  # noqa: SIM115 closed in __exit__
        self._handle.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, cast to its entry's type; in any order, each once.

        Raises:
            ValueError: the shape is not that of the entry, or it was written before.
        """
        import torch

        entry = self._entries[name]
        if list(tensor.shape) != entry["shape"] or name not in self._open:
            raise ValueError(f"{name}: {list(tensor.shape)} cannot be written as {entry}")
        plain = tensor.detach().to("cpu", getattr(torch, TORCH_NAMES[entry["dtype"]])).contiguous()
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()
        if kind is None and not self._open:
            flush_to_disk(self._aside)
            os.replace(self._aside, self._file)
            return
        self._aside.unlink(missing_ok=True)
        if kind is None:
            raise ValueError(f"never written: {', '.join(sorted(self._open)[:4])}")
