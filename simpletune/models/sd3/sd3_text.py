"""SD3's text side: CLIP-L, CLIP-G and T5.

Shapes: L = 77 CLIP tokens, widths 768 (CLIP-L) and 1280 (CLIP-G), T T5 tokens of width e = 4096 (for SD3 Medium).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

from simpletune.models.text.clip import ClipEncoder
from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.family_text import FamilyText, HasFiles, TextRegion
from simpletune.models.text.t5 import T5Encoder
from simpletune.system.options import plural

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.models.shared.conditioning import Conditioning

CLIP_TOKENS = 77
CLIP = (
    ClipEncoder("clip_l", "tokenizer", "text_encoder", "CLIP-L", projected=True, penultimate=True),
    ClipEncoder("clip_g", "tokenizer_2", "text_encoder_2", "CLIP-G", projected=True, penultimate=True),
)


class SD3Options(HasFiles, Protocol):
    """The fields of SD3's option that its text side reads."""

    t5: bool
    t5_length: int
    t5_cached: str


class SD3Text(FamilyText[SD3Options]):
    """CLIP-L, CLIP-G and, unless zeros replace its T embeddings, T5."""

    optional: ClassVar[Mapping[str, str]] = {"text_encoder_3": "model.t5=false"}

    @property
    def encoders(self) -> Sequence[TextEncoder]:
        option = self.family
        packed = option.t5_cached == "int8"
        t5 = T5Encoder("t5", "tokenizer_3", "text_encoder_3", "T5", option.t5_length, packed)
        return (*CLIP, t5) if option.t5 else CLIP

    @property
    def tokens(self) -> int:
        """CLIP's, then T5's."""
        return CLIP_TOKENS + self.family.t5_length

    @cached_property
    def width(self) -> int:
        return int(self.family.files.known_config()["joint_attention_dim"])

    @cached_property
    def pooled_width(self) -> int:
        return int(self.family.files.known_config()["pooled_projection_dim"])

    def fits(self, widths: Sequence[int]) -> bool:
        return sum(widths[:2]) <= self.width and all(width == self.width for width in widths[2:])

    def describe(self) -> str:
        return f"T5 with {plural(self.family.t5_length, 'token')}" if self.family.t5 else "no T5"

    def pipeline_arguments(self) -> dict[str, str]:
        """Leave out T5 if it is not in use."""
        return {} if self.family.t5 else {"text_encoder_3": "None", "tokenizer_3": "None"}

    def call_arguments(self) -> dict[str, object]:
        return {"max_sequence_length": self.family.t5_length}

    def regions(self) -> dict[str, TextRegion]:
        """Place CLIP-L and CLIP-G side by side, T5 after them."""
        clip_l, clip_g = (self.family.files.known_part(part).config() for part in ("text_encoder", "text_encoder_2"))
        width, pooled = int(clip_l["hidden_size"]), int(clip_l["projection_dim"])
        found = {
            "clip_l": TextRegion("text_encoder", width, 0, (0, pooled)),
            "clip_g": TextRegion(
                "text_encoder_2", int(clip_g["hidden_size"]), width, (pooled, int(clip_g["projection_dim"]))
            ),
        }
        return found | ({"t5": TextRegion("text_encoder_3", self.width, last=True)} if self.family.t5 else {})

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        """Join CLIP-L and CLIP-G side by side, padded with zeros to e, then T5 along the sequence (arXiv:2403.03206,
        section 4): embeds [L + T, e] and pooled [768 + 1280], with leading batch dimensions if the parts have any."""
        import torch

        from simpletune.models.shared.conditioning import Conditioning

        clip = torch.cat([parts["clip_l"]["hidden"], parts["clip_g"]["hidden"]], dim=-1)
        clip = torch.nn.functional.pad(clip, (0, self.width - clip.shape[-1]))
        zeros = (*clip.shape[:-2], self.family.t5_length, self.width)
        t5 = parts["t5"]["hidden"] if self.family.t5 else clip.new_zeros(zeros)
        return Conditioning(torch.cat([clip, t5], dim=-2), pooled=self.pool(parts))

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        import torch

        return torch.cat([parts["clip_l"]["pooled"], parts["clip_g"]["pooled"]], dim=-1)
