"""What a request may ask for, and how many may wait. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

SCALE = 4.0  # a LoRA at more than four times its strength draws noise
GUIDANCE = 30.0


@dataclass(frozen=True)
class Limits:
    """Bounds of every request.

    Args:
        side: width and height in pixels, at most.
        steps: sampling steps of a picture, at most.
        instances: pictures of a request, at most.
        prompt: characters of a prompt, at most.
        body: bytes of a request, at most.
        queue: requests that wait, at most; further ones are answered with 429.
        seconds: from a request's arrival to its answer, at most.
    """

    side: int = 1024
    steps: int = 100
    instances: int = 4
    prompt: int = 2000
    body: int = 256 * 1024
    queue: int = 32
    seconds: float = 600.0
