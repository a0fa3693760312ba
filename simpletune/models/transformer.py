"""The part of SD3's transformer that this package reads, for type checkers: diffusers' class carries no types."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class Transformer(nn.Module):
    """The protocol of SD3's transformer. A class, not a ``Protocol``, because it must also pass for an ``nn.Module``.

    Nothing is made of this class: what ``SD3.load_transformer`` returns is diffusers' SD3Transformer2DModel.
    """

    transformer_blocks: Sequence[nn.Module]
    """The MMDiT blocks, in order."""
    proj_out: nn.Linear
    """The output layer; it is never streamed, so its device is where the model computes."""
