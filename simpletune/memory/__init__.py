"""The memory levers: each is exact, or says what it changes, and is one small module of this package."""

from __future__ import annotations

from typing import Literal

from simpletune.options import Option


class Memory(Option):
    """What is given for less memory on the device: mostly time."""

    checkpointing: Literal["all", "none"] = "all"
    """Gradient checkpointing. all: every block computes its activations twice instead of keeping them, about a third
    slower and several times less memory; none: they are kept. Exact."""
