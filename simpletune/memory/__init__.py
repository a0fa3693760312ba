"""The memory levers: each is exact, or says what it changes, and is one small module of this package."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpletune.options import Option


class Memory(Option):
    """What is given for less memory on the device: mostly time."""

    checkpointing: Literal["all", "none"] = "all"
    """Gradient checkpointing. all: every block computes its activations twice instead of keeping them, about a third
    slower and several times less memory; none: they are kept. Exact."""
    crop_positions: bool = True
    """Keep only the part of the position table that the run's pictures need: 12 MiB instead of 108 for SD3 Medium in
    bf16 at 1024 px. Exact; a full model is exported with the whole table."""
    modulation: Literal["resident", "plan"] = "resident"
    """The adaLN modulation weights, a third of SD3 Medium. resident: on the device; plan: in host memory, and the
    modulations of the coming steps are computed ahead, for adapters that leave these weights alone. Exact but for the
    last bits: products of several steps' rows at once."""
    modulation_window: Annotated[int, Field(ge=1, le=1024)] = 16
    """Steps whose modulations are computed at once: for SD3 Medium each takes 0.9 MB a sample in bf16, and each window
    moves the modulation weights to the device once."""
    cache_quantised: bool = True
    """Keep the quantised base under output.cache: the next start reads it, and neither reads nor quantises the
    full-precision weights. It takes the disk what the quantised weights take the device. Exact."""
