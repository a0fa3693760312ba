"""Combine the outputs of Stable Diffusion XL's two text encoders, CLIP-L and CLIP-G.

Both provide their penultimate hidden state without a final norm.

Shapes: L = 77 tokens, widths 768 (CLIP-L) and 1280 (CLIP-G).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from simpletune.models.shared.prompts import Prompts


class SDXLPrompts(Prompts):
    """Text side of a pipeline of Stable Diffusion XL."""

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """One prompt's embedding [L, 768 + 1280], and CLIP-G's pooled embedding [1280]."""
        return torch.cat([parts[each.name]["hidden"] for each in self.encoders], dim=-1), self.pool(parts)

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """CLIP-G's: the projection of its final state at the end of the text."""
        return parts["clip_g"]["pooled"]
