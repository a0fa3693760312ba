"""Qwen-Image's text side: Qwen2.5-VL-7B's last states, of the tokens of the prompt alone.

Shapes: t text tokens, at most 1024, e = 3584 text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.family_text import FamilyText, HasFiles, TextRegion
from simpletune.models.text.qwen25 import NOTHING, Qwen25Encoder

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.models.shared.conditioning import Conditioning


class QwenImageOptions(HasFiles, Protocol):
    """The field of Qwen-Image's option that its text side reads."""

    text_length: int


class QwenImageText(FamilyText[QwenImageOptions]):
    """Qwen2.5-VL."""

    one_length: ClassVar[bool] = False
    masked: ClassVar[bool] = True

    @property
    def encoders(self) -> Sequence[TextEncoder]:
        return (Qwen25Encoder("qwen25", "tokenizer", "text_encoder", "Qwen2.5-VL", self.family.text_length),)

    @property
    def tokens(self) -> int:
        return self.family.text_length

    @property
    def width(self) -> int:
        return int(self.family.files.known_config()["joint_attention_dim"])

    def regions(self) -> Mapping[str, TextRegion]:
        return {"qwen25": TextRegion("text_encoder", self.width)}

    def describe(self) -> str:
        return f"Qwen2.5-VL with at most {self.tokens} tokens"

    def steered_from(self, negative_prompt: str | None) -> str | None:
        return NOTHING if negative_prompt is None else negative_prompt

    def call_arguments(self) -> dict[str, object]:
        return {"max_sequence_length": self.family.text_length}

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        from simpletune.models.shared.conditioning import Conditioning

        return Conditioning(parts["qwen25"]["hidden"])
