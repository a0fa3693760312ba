"""Z-Image's text side: Qwen3-4B without its last layer, for the tokens of the prompt alone.

Shapes: L tokens of a prompt, at most 512, t the same padded to a multiple of 32, e = 2560 text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.family_text import FamilyText, HasFiles, TextRegion
from simpletune.models.text.qwen3 import Qwen3Encoder
from simpletune.models.zimage.zimage_files import MULTIPLE, padded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from simpletune.models.shared.conditioning import Conditioning

TAPS = (-2,)
"""Which hidden states are read: those before the last layer."""
TOKENS = "tokens"
"""The number of a prompt's tokens, among its conditioning: Z-Image pads its text by itself, with a learned token."""


class ZImageOptions(HasFiles, Protocol):
    """The field of Z-Image's option that its text side reads."""

    text_length: int


class ZImageText(FamilyText[ZImageOptions]):
    """Qwen3."""

    one_length: ClassVar[bool] = False
    masked: ClassVar[bool] = True
    length_multiple: ClassVar[int | None] = MULTIPLE

    @property
    def encoders(self) -> Sequence[TextEncoder]:
        parts = "qwen3", "tokenizer", "text_encoder", "Qwen3", self.family.text_length
        return (Qwen3Encoder(*parts, taps=TAPS, thinking=True),)

    @property
    def tokens(self) -> int:
        return self.family.text_length

    @property
    def width(self) -> int:
        return int(self.family.files.known_config()["cap_feat_dim"])

    def regions(self) -> Mapping[str, TextRegion]:
        return {"qwen3": TextRegion("text_encoder", self.width)}

    def describe(self) -> str:
        return f"Qwen3 with at most {self.tokens} tokens"

    def call_arguments(self) -> dict[str, object]:
        return {"max_sequence_length": self.family.text_length}

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        import torch
        from torch.nn.functional import pad

        from simpletune.models.shared.conditioning import Conditioning

        hidden = parts["qwen3"]["hidden"]
        length = len(hidden)
        embeds = pad(hidden, (0, 0, 0, padded(length) - length))
        return Conditioning(embeds, extra={TOKENS: torch.tensor(length)})

    def blank(self, dtype: torch.dtype, rows: int | None = None) -> Conditioning:
        import torch

        found = super().blank(dtype, rows)
        shape = () if rows is None else (rows,)
        return replace(found, extra={TOKENS: torch.full(shape, self.tokens)})
