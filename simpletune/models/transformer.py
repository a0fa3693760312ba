"""Type annotations for the attributes of SD3's transformer that this package uses; diffusers' class has none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class Transformer(nn.Module):
    """The protocol of SD3's transformer. A class rather than a ``Protocol``, because it must also be an ``nn.Module``.

    Never instantiated: ``SD3.load_transformer`` returns diffusers' SD3Transformer2DModel.
    """

    transformer_blocks: Sequence[nn.Module]
    """The MMDiT blocks, in order."""
    proj_out: nn.Linear
    """The output layer. It is never streamed, so its device is the compute device."""
