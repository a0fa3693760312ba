"""What a shared file states about its run: when it was trained, a thumbnail, the trigger words and tags."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from PIL import Image, ImageOps

from simpletune.config.schema import TrainConfig
from simpletune.runs.attempts import attempts_of
from simpletune.runs.folder import SAMPLES

SIDE = 256  # pixels; the model spec recommends 256x256
MOST = 32_000  # characters of a thumbnail in the header
QUALITIES = ((SIDE, 85), (SIDE, 70), (SIDE, 50), (SIDE, 30), (SIDE // 2, 50), (SIDE // 4, 50))
"""Sides and JPEG qualities to try, in this order."""
PREFIX = "data:image/jpeg;base64,"
DATE = "%Y-%m-%dT%H:%M:%SZ"


def trained_at(run: Path) -> str | None:
    """When a run's last attempt ended, in UTC as ISO 8601; None if it is not recorded.

    Exports of one run have the same date, and so the same bytes.
    """
    attempts = attempts_of(run)
    if not attempts:
        return None
    return (attempts[-1].started + timedelta(seconds=round(attempts[-1].seconds))).strftime(DATE)


def thumbnail(run: Path, step: int | None) -> str | None:
    """A run's validation picture of a step, or of the last one drawn, as a small JPEG in a data URI; None if there is
    none."""
    states = sorted((run / SAMPLES).glob("step-*")) if step is None else [run / SAMPLES / f"step-{step:06d}"]
    for state in reversed(states):
        for file in sorted(state.glob("prompt-*.png")):
            return small_jpeg(file)
    return None


def small_jpeg(file: Path) -> str | None:
    """A picture as a square JPEG in a data URI of at most ``MOST`` characters; None if it cannot be read.

    Drops metadata, because a PNG's text chunks contain the prompt.
    """
    try:
        with Image.open(file) as image:
            plain = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    for side, quality in QUALITIES:
        small = ImageOps.fit(plain, (side, side), Image.Resampling.LANCZOS)
        clean, buffer = Image.new("RGB", small.size), io.BytesIO()
        clean.paste(small)
        clean.save(buffer, "JPEG", quality=quality, optimize=True)
        uri = PREFIX + base64.b64encode(buffer.getvalue()).decode()
        if len(uri) <= MOST:
            return uri
    return None


def trigger_of(config: TrainConfig) -> str | None:
    """The trigger words: the prompt of all pictures, or what precedes every caption."""
    if config.data.prompt:
        return config.data.prompt
    prefixes = {source.caption_prefix.strip(" ,") for source in config.data.members if not source.regularization}
    return (prefixes.pop() or None) if len(prefixes) == 1 else None


def tags_of(config: TrainConfig) -> Iterator[str]:
    """Tags for finding the file."""
    yield config.adapter.method
    yield config.model.diffusers.tag
    yield "simpletune"
