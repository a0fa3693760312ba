"""Combine the outputs of SD3's three text encoders.

Shapes: L = 77 CLIP tokens, widths 768 (CLIP-L) and 1280 (CLIP-G), T T5 tokens of width e = 4096 (for SD3 Medium).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from simpletune.models.shared.parts import Part, TextEncoder
from simpletune.models.shared.prompts import Prompts


class SD3Prompts(Prompts):
    """Text side of an SD3 pipeline: CLIP-L, CLIP-G and, unless zeros replace its T = ``t5_length`` embeddings, T5.
    ``width`` is e; see ``Prompts``."""

    def __init__(
        self,
        part: Callable[[str], Part],
        encoders: Sequence[TextEncoder],
        dtype: torch.dtype,
        t5_length: int,
        width: int,
    ):
        super().__init__(part, encoders, dtype)
        self.t5_length, self.width = t5_length, width

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """CLIP-L and CLIP-G side by side, padded with zeros to e, then T5 along the sequence (arXiv:2403.03206, section
        4): prompt_embeds [L + T, e] and pooled [768 + 1280], with leading batch dimensions if the parts have any."""
        clip = torch.cat([parts["clip_l"]["hidden"], parts["clip_g"]["hidden"]], dim=-1)
        clip = torch.nn.functional.pad(clip, (0, self.width - clip.shape[-1]))
        zeros = (*clip.shape[:-2], self.t5_length, self.width)
        t5 = parts["t5"]["hidden"] if len(self.encoders) == 3 else clip.new_zeros(zeros)
        return torch.cat([clip, t5], dim=-2), self.pool(parts)

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        return torch.cat([parts["clip_l"]["pooled"], parts["clip_g"]["pooled"]], dim=-1)
