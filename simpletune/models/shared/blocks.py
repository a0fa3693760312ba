"""Parts of transformer blocks that families share.

Shapes: b samples, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from simpletune.engine.kernels.adaln import GatedTokens, ScaleShift, normalise_and_modulate


def with_feed_forward(
    x: Tensor,  # [b, n, d]
    added: GatedTokens,
    parts: Sequence[Tensor],  # shift, scale and gate of the network, [b, d] each
    norm: nn.LayerNorm,
    network: nn.Module,
) -> tuple[Tensor, GatedTokens]:
    """Add the output of attention, and run the feed-forward network on the normalised sum; return the sum, and the
    network's gated output, still to be added."""
    shift, scale, gate = parts[:3]
    x, inputs = normalise_and_modulate(x, added, [ScaleShift(scale, shift)], norm.eps)
    del added
    return x, GatedTokens(network(inputs.pop()), gate)
