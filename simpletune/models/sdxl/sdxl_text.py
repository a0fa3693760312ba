"""Stable Diffusion XL's text side: CLIP-L and CLIP-G, and the sizes of pictures.

Both encoders provide their penultimate hidden state without a final norm.

Shapes: L = 77 tokens, widths 768 (CLIP-L) and 1280 (CLIP-G).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.shared.buckets import Framing
from simpletune.models.text.clip import ClipEncoder
from simpletune.models.text.family_text import TextRegion
from simpletune.models.unet.unet_text import UNetText

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.models.shared.conditioning import Conditioning

NUMBERS = 6
"""The numbers of a framing: height and width before scaling, top and left of the crop, height and width after it."""
CLIP = (
    ClipEncoder("clip_l", "tokenizer", "text_encoder", "CLIP-L", penultimate=True),
    ClipEncoder("clip_g", "tokenizer_2", "text_encoder_2", "CLIP-G", projected=True, penultimate=True),
)


class SDXLText(UNetText):
    """CLIP-L and CLIP-G."""

    encoders: ClassVar[Sequence[ClipEncoder]] = CLIP
    reads_framing: ClassVar[bool] = True

    @cached_property
    def pooled_width(self) -> int:
        known = self.family.files.known_config()
        return int(known["projection_class_embeddings_input_dim"]) - NUMBERS * int(known["addition_time_embed_dim"])

    def steered_from(self, negative_prompt: str | None) -> str | None:
        """Return None, for zeros, where diffusers' pipeline takes them: for no negative prompt, unless
        ``model_index.json`` says no. Without one, as for a single file, it takes them, too."""
        if negative_prompt is None and self.family.files.pipeline_index().get("force_zeros_for_empty_prompt", True):
            return None
        return super().steered_from(negative_prompt)

    def describe(self) -> str:
        return "CLIP-L and CLIP-G"

    def regions(self) -> dict[str, TextRegion]:
        """Place CLIP-L and CLIP-G side by side."""
        first = self.width - self.pooled_width
        return {
            "clip_l": TextRegion("text_encoder", first),
            "clip_g": TextRegion("text_encoder_2", self.pooled_width, first, (0, self.pooled_width)),
        }

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        """Return one prompt's embedding [L, 768 + 1280], and CLIP-G's pooled embedding [1280]."""
        import torch

        from simpletune.models.shared.conditioning import Conditioning

        embeds = torch.cat([parts[each.name]["hidden"] for each in self.encoders], dim=-1)
        return Conditioning(embeds, pooled=self.pool(parts))

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Return CLIP-G's: the projection of its final state at the end of the text."""
        return parts["clip_g"]["pooled"]

    def framed(self, conditioning: Conditioning, framings: Sequence[Framing]) -> Conditioning:
        """Add ``time_ids`` [b, 6] in fp32, because bf16 lacks some of the sizes."""
        import torch

        numbers = [[size for pair in framing for size in reversed(pair)] for framing in framings]
        return replace(conditioning, extra={"time_ids": torch.tensor(numbers, dtype=torch.float32)})
