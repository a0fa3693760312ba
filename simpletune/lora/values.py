"""The values in a safetensors file, looked at without torch: what is not finite, and what is zero throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 2**22
# Type: NumPy's unsigned integer, the bits of the exponent, the bits without the sign.
FLOATS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": ("<u2", 0x7C00, 0x7FFF),
    "BF16": ("<u2", 0x7F80, 0x7FFF),
    "F8_E5M2": ("<u1", 0x7C, 0x7F),
    "F8_E4M3": ("<u1", 0x7F, 0x7F),  # NaN alone; it has no infinity
}


@dataclass(frozen=True)
class Values:
    """What one tensor holds.

    Args:
        not_finite: how many values are NaN or infinite.
        zero: whether all are zero.
    """

    not_finite: int
    zero: bool


def look_at(file: Path, entries: Mapping[str, Any]) -> dict[str, Values]:
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
            if entry["dtype"] not in FLOATS:
                continue
            kind, exponent, magnitude = FLOATS[entry["dtype"]]
            begin, end = entry["data_offsets"]
            handle.seek(start + begin)
            not_finite, zero = 0, True
            while begin < end:
                chunk = np.frombuffer(handle.read(min(CHUNK, end - begin)), dtype=kind)
                begin += chunk.nbytes
                not_finite += int(((chunk & exponent) == exponent).sum())
                zero = zero and not (chunk & magnitude).any()
            found[name] = Values(not_finite, zero)
    return found
