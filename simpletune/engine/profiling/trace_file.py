"""Convert the profiler's export, line by line because it may have gigabytes, to a trace for TensorBoard's plugin."""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

SUFFIX = ".pt.trace.json.gz"
MB = 10**6
# torch-tb-profiler 0.4.3 knows only the categories of older traces; with new ones its operator view has no device time.
RENAMED = {'"cat": "cuda_runtime"': '"cat": "Runtime"', '"cat": "cuda_driver"': '"cat": "Runtime"',
           '"cat": "fwdbwd"': '"cat": "forward_backward"'}  # fmt: skip


class TooLarge(Exception):
    """A trace that exceeds the maximum size."""


def write_trace(export: Callable[[str], object], folder: Path, max_mb: float) -> Path:
    """Export a trace into an epoch's folder, gzipped, with the category names that TensorBoard's plugin knows.

    Args:
        export: writes the raw trace to a path.
        folder: the epoch's folder.
        max_mb: maximum size of the file, in MB of 10^6 bytes.

    Returns:
        The file.

    Raises:
        TooLarge: the file would exceed ``max_mb``; nothing is left behind.
        OSError: the file cannot be written; nothing is left behind.
    """
    with TemporaryDirectory(dir=folder, prefix=".trace-") as temporary:
        raw, packed = Path(temporary) / "raw.json", Path(temporary) / "packed.json.gz"
        export(str(raw))
        require_whole(raw)
        pack(raw, packed, max_mb)
        file = folder / f"training.{time.time_ns()}{SUFFIX}"
        os.replace(packed, file)
    return file


def require_whole(raw: Path) -> None:
    """Check the trace's end, because the profiler does not report failed writes.

    Raises:
        OSError: the trace is missing or truncated.
    """
    size = raw.stat().st_size if raw.exists() else 0
    with open(raw if size else os.devnull, "rb") as handle:
        handle.seek(max(0, size - 64))
        end = handle.read().strip()
    if not end.endswith(b"}"):
        raise OSError(f"the trace was truncated after {size:,} bytes: is the disk full?")


def pack(raw: Path, packed: Path, max_mb: float) -> None:
    """Rename a raw trace's categories and gzip it.

    Raises:
        TooLarge: the result would be larger than ``max_mb``.
    """
    with open(raw, encoding="utf-8") as source, open(packed, "wb") as out, gzip.open(out, "wt", 6, "utf-8") as target:
        for number, line in enumerate(source):
            target.write(rename_category(line))
            if number % 10_000 == 0 and out.tell() > max_mb * MB:
                break
    if packed.stat().st_size > max_mb * MB:
        raise TooLarge(f"{packed.stat().st_size / MB:.3g} MB or more")


def rename_category(line: str) -> str:
    """Rename the category in a line; quotes inside strings are escaped, so nothing else matches."""
    for old, new in RENAMED.items():
        if old in line:
            return line.replace(old, new)
    return line
