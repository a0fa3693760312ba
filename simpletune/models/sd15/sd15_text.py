"""The text side of Stable Diffusion 1.x (CLIP-L) and 2.x (OpenCLIP-H).

Both provide the last hidden state after the final layer norm. Stable Diffusion 2's encoder is stored without its last
layer, so for it this is the normalised output of the penultimate layer.

Shapes: L = 77 tokens, e = 768 (CLIP-L) or 1024 (OpenCLIP-H).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.text.clip import ClipEncoder
from simpletune.models.text.family_text import TextRegion
from simpletune.models.unet.unet_text import UNetText

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.models.shared.conditioning import Conditioning


class SD15Text(UNetText):
    """A single CLIP encoder, without a pooled output."""

    encoders: ClassVar[Sequence[ClipEncoder]] = (ClipEncoder("clip", "tokenizer", "text_encoder", "CLIP"),)

    def describe(self) -> str:
        return "CLIP"

    def regions(self) -> dict[str, TextRegion]:
        return {"clip": TextRegion("text_encoder", self.width)}

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        """Return one prompt's embedding [L, e]."""
        from simpletune.models.shared.conditioning import Conditioning

        return Conditioning(parts["clip"]["hidden"])
