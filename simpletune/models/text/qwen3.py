"""Qwen3 as a text encoder, which runs layer by layer: of its layers only those up to the last tapped one are read.

A prompt is a user's message in the tokenizer's chat template, with an answer begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.text.encoder import EncoderChanges, OpenEncoder, TextEncoder, Tokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Qwen3Encoder(TextEncoder):
    """A Qwen3."""

    taps: tuple[int, ...] = ()
    """Which hidden states are read, side by side: the numbers of layers, from 1; or from the end, where -1 is the
    output after the last layer and -2 that before it."""
    padded: bool = False  # whether the states of the padding up to ``length`` are read, too
    thinking: bool = False  # whether the answer may begin with thoughts; if not, the template puts empty ones there

    kind: ClassVar[str] = "Qwen3"
    templated: ClassVar[bool] = True

    @property
    def states(self) -> str:
        ways = [way for way in ("padded", "thinking") if getattr(self, way)]
        return "-".join(["", ".".join(map(str, self.taps)), *ways])

    @property
    def template(self) -> tuple[str, str]:
        thoughts = "" if self.thinking else "<think>\n\n</think>\n\n"
        return "<|im_start|>user\n", f"<|im_end|>\n<|im_start|>assistant\n{thoughts}"

    def width(self, config: ModelConfig) -> int:
        return len(self.taps) * int(config["hidden_size"])

    def positions(self, config: ModelConfig) -> int | None:
        return int(config["max_position_embeddings"])

    def tokenizer_class(self) -> type[PreTrainedTokenizerBase]:
        from transformers import Qwen2Tokenizer

        return Qwen2Tokenizer

    def text(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        said = [{"role": "user", "content": prompt}]
        return str(
            tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True, enable_thinking=self.thinking
            )
        )

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Tokens:
        found = tokenizer(
            [self.text(tokenizer, prompt) for prompt in prompts],
            padding="max_length" if self.padded else True,
            padding_side="right",
            max_length=self.length,
            truncation=True,
            return_tensors="pt",
        )
        return Tokens(found.input_ids, found.attention_mask.bool(), self.padded)

    def open(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        changes: EncoderChanges | None = None,
    ) -> OpenEncoder:
        from simpletune.models.text.layered_qwen3 import LayeredQwen3

        return LayeredQwen3(part, dtype, device, changes=changes, taps=self.taps)

    def open_empty(self, part: Part, dtype: torch.dtype, device: torch.device) -> OpenEncoder:
        from simpletune.models.text.layered import EmptyTensors
        from simpletune.models.text.layered_qwen3 import LayeredQwen3

        opened = LayeredQwen3(part, dtype, device, lambda model: EmptyTensors(model, dtype), taps=self.taps)
        opened.model.to("meta")  # accelerate creates its empty weights on the CPU under fake tensors
        return opened
