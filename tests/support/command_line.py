"""Verbs as a user types them, on small runs."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

from PIL import Image

SMALL = ("--device", "cpu", "--steps", "2")


def pixels_of(file: Path | io.BytesIO) -> bytes:
    return Image.open(file).convert("RGB").tobytes()


def parsed(add: Callable[[argparse.ArgumentParser], None], *words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args([*(str(word) for word in words), *SMALL])
