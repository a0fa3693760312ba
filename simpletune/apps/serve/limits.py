"""Limits of a request and of the queue. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

SCALE = 4.0  # beyond four times its strength a LoRA produces noise
GUIDANCE = 30.0


@dataclass(frozen=True)
class Limits:
    """Limits of every request; upper ones, but for ``multiple``."""

    side: int = 1024  # width and height in pixels
    multiple: int = 16  # of which they are multiples; the family's
    steps: int = 100  # sampling steps per picture
    instances: int = 4  # pictures per request
    prompt: int = 2000  # characters per prompt
    body: int = 8 * 2**20  # bytes per request, for a picture and a mask in base64
    pixels: int = 2**24  # of a picture or a mask that is sent
    all_pixels: int = 2**25  # of all pictures and masks of a request
    queue: int = 32  # waiting requests; further ones get status 429
    seconds: float = 600.0  # from a request's arrival to its response
