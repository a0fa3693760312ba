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
    optimizer_in_backward: bool = False
    """Each parameter is updated, and its gradient freed, during the backward pass, so that gradients never stand
    together: saves a full fine-tuning 2 bytes a parameter in bf16, 4 in fp32. Exact; needs gradient_accumulation 1, one
    process, and train.clip per_parameter (or clip_norm null)."""
    vae_tile: Annotated[int, Field(ge=128, multiple_of=64)] | None = None
    """The autoencoder encodes and decodes larger pictures in overlapping tiles of this many pixels, blended, with the
    memory of one tile; null: whole pictures. Not exact: a tile's norms and attention do not see its neighbours.
    AutoencoderTiny takes pictures whole all the same: it needs little."""
