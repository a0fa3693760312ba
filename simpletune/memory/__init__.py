"""The memory levers: each is exact, or says what it changes, and is one small module of this package."""

from __future__ import annotations

from typing import Literal

from simpletune.options import Option


class Memory(Option):
    """What is given for less memory on the device: mostly time."""

    checkpointing: Literal["all", "none"] = "all"
    """Gradient checkpointing. all: every block computes its activations twice instead of keeping them, about a third
    slower and several times less memory; none: they are kept. Exact."""
    cache_quantised: bool = True
    """Keep the quantised base under output.cache: the next start reads it, and neither reads nor quantises the
    full-precision weights. It takes the disk what the quantised weights take the device. Exact."""
