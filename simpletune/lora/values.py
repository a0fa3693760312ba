"""The values in a safetensors file, looked at without torch: what is not finite, and what is zero throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletune.lora.header import TensorEntry
from simpletune.system.safetensors_file import TYPES

CHUNK = 2**22


@dataclass(frozen=True)
class ScannedValues:
    """What one tensor holds.

    Args:
        not_finite: how many values are NaN or infinite.
        zero: whether all are zero.
    """

    not_finite: int
    zero: bool


def scan_values(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, ScannedValues]:
    """The floating-point tensors of a file, 4 Mi bytes at a time.

    A number is not finite when its exponent's bits are all ones, in every type but the 8-bit one without infinities.

    Args:
        file: safetensors, whose header is sound.
        entries: of the header.
    """
    import numpy as np

    found = {}
    with open(file, "rb") as handle:
        start = 8 + int.from_bytes(handle.read(8), "little")
        for name, entry in entries.items():
            of = TYPES.get(entry["dtype"])
            if of is None or not of.exponent:
                continue
            begin, end = entry["data_offsets"]
            handle.seek(start + begin)
            not_finite, zero = 0, True
            while begin < end:
                chunk = np.frombuffer(handle.read(min(CHUNK, end - begin)), dtype=f"<u{of.bytes}")
                begin += chunk.nbytes
                not_finite += int(((chunk & of.exponent) == of.exponent).sum())
                zero = zero and not (chunk & of.magnitude).any()
            found[name] = ScannedValues(not_finite, zero)
    return found
