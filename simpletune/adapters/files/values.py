"""Scan the values of a safetensors file for non-finite numbers, all-zero tensors and norms, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from simpletune.adapters.files.header import TensorEntry
from simpletune.system.safetensors_file import TYPES

CHUNK = 2**22


def scan_values(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, tuple[int, bool]]:
    """Scan the floating-point tensors of a file with a valid header, 4 MiB at a time.

    A number is not finite if all bits of its exponent are ones, in every type except the 8-bit type without infinities.

    Returns:
        By name how many values are NaN or infinite, and whether all are zero.
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
            found[name] = (not_finite, zero)
    return found


def row_norms(file: Path, entry: TensorEntry) -> list[float]:
    """The Euclidean norm of each row of a tensor in fp32, fp16 or bf16; one norm for a vector."""
    import numpy as np

    begin, end = entry["data_offsets"]
    with open(file, "rb") as handle:
        start = 8 + int.from_bytes(handle.read(8), "little")
        handle.seek(start + begin)
        data = handle.read(end - begin)
    if entry["dtype"] == "BF16":
        values = (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, dtype={"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
    rows = values.astype(np.float64).reshape(-1, entry["shape"][-1])
    return [float(norm) for norm in np.sqrt((rows * rows).sum(axis=1))]
