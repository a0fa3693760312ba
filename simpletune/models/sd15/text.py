"""Combine the output of the CLIP encoder of Stable Diffusion 1.x (CLIP-L) or 2.x (OpenCLIP-H).

Both provide the last hidden state after the final layer norm. Stable Diffusion 2's encoder is stored without its last
layer, so for it this is the normalised output of the penultimate layer.

Shapes: L = 77 tokens, e = 768 (CLIP-L) or 1024 (OpenCLIP-H).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from simpletune.models.shared.prompts import Prompts


class ClipPrompts(Prompts):
    """Text side of a pipeline with a single CLIP encoder."""

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """One prompt's embedding [L, e], and a pooled embedding of width 0."""
        return parts[self.encoders[0].name]["hidden"], self.pool(parts)

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """A tensor [0]: this family has no pooled embedding."""
        return parts[self.encoders[0].name]["hidden"].new_zeros(0)
