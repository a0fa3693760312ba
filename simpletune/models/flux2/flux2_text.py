"""klein's text side: three layers of Qwen3-4B, padding included.

Shapes: t = 512 text tokens, e = 7680 text width: 3 x 2560 (for klein 4B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.family_text import FamilyText, HasFiles, TextRegion
from simpletune.models.text.qwen3 import Qwen3Encoder

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.models.shared.conditioning import Conditioning

TAPS = (9, 18, 27)
"""The layers of Qwen3 whose states klein was trained on, all 36 of which its pipeline computes. diffusers' training
script takes 10, 20 and 30 unless told otherwise (0.42.1; huggingface/diffusers#13445)."""


class KleinOptions(HasFiles, Protocol):
    """The field of klein's option that its text side reads."""

    text_length: int


class KleinText(FamilyText[KleinOptions]):
    """Qwen3."""

    @property
    def encoders(self) -> Sequence[TextEncoder]:
        # A prompt has 512 x 7680 numbers, however short it is: 7.5 MiB in bf16, and 4.0 packed.
        parts = "qwen3", "tokenizer", "text_encoder", "Qwen3", self.family.text_length
        return (Qwen3Encoder(*parts, packed=True, taps=TAPS, padded=True),)

    @property
    def tokens(self) -> int:
        return self.family.text_length

    @cached_property
    def width(self) -> int:
        return int(self.family.files.known_config()["joint_attention_dim"])

    def regions(self) -> Mapping[str, TextRegion]:
        return {"qwen3": TextRegion("text_encoder", self.width)}

    def describe(self) -> str:
        return f"Qwen3 with {self.tokens} tokens"

    def call_arguments(self) -> dict[str, object]:
        return {"max_sequence_length": self.family.text_length}

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        from simpletune.models.shared.conditioning import Conditioning

        return Conditioning(parts["qwen3"]["hidden"])
