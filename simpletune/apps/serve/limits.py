"""Limits of a request and of the queue. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

SCALE = 4.0  # beyond four times its strength a LoRA produces noise
GUIDANCE = 30.0


@dataclass(frozen=True)
class Limits:
    """Upper limits of every request.

    Args:
        side: width and height in pixels.
        steps: sampling steps per picture.
        instances: pictures per request.
        prompt: characters per prompt.
        body: bytes per request.
        queue: waiting requests; further ones get status 429.
        seconds: seconds from a request's arrival to its response.
    """

    side: int = 1024
    steps: int = 100
    instances: int = 4
    prompt: int = 2000
    body: int = 256 * 1024
    queue: int = 32
    seconds: float = 600.0
