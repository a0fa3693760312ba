"""Measure what the machine does besides the device: read and write pictures, draw noise, write files."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

from simpletune.system.rng import stream

SIDE = 1024  # pixels
WRITTEN = 2**26  # bytes


def machine_rates() -> dict[str, float]:
    """Seconds per pixel of reading a JPEG (``read_jpeg``) and writing a PNG (``write_png``), per number of noise drawn
    on the host (``noise``), and per byte written to the temporary folder's disk (``write_byte``)."""
    from PIL import Image

    values = (stream(0, "calibrate").random((SIDE // 8, SIDE // 8, 3)) * 255).astype(np.uint8)
    picture = Image.fromarray(values).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=92)

    def read() -> None:
        np.asarray(Image.open(io.BytesIO(jpeg.getvalue())).convert("RGB").resize((SIDE // 2, SIDE // 2)))

    pixels = SIDE**2
    return {
        "read_jpeg": _seconds(read) / pixels,
        "write_png": _seconds(lambda: picture.save(io.BytesIO(), "PNG")) / pixels,
        "noise": _seconds(lambda: stream(0, "noise").standard_normal(2**18, dtype=np.float32)) / 2**18,
        "write_byte": _seconds(_written) / WRITTEN,
    }


def _written() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\1" * WRITTEN)
        file.flush()
        os.fsync(file.fileno())


def _seconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        clock = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - clock)
    return best
