"""The text part of Qwen2.5-VL as a text encoder, which runs layer by layer; its vision tower is never read.

A prompt stands in a template that asks for a description of a picture. The states of the template's beginning are
dropped: no prompt changes them, because attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.text.encoder import EncoderChanges, OpenEncoder, TextEncoder, Tokens
from simpletune.system.options import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

BEFORE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
DROPPED = 34  # tokens of ``BEFORE``
NOTHING = " "
"""What an empty prompt is encoded as: the model knows no text at all by one space (diffusers' QwenImagePipeline)."""


@dataclass(frozen=True)
class Qwen25Encoder(TextEncoder):
    """A Qwen2.5-VL. ``length`` counts what is kept: a prompt's tokens, and the 5 of the template after them."""

    kind: ClassVar[str] = "Qwen2.5-VL"

    @property
    def template(self) -> tuple[str, str]:
        return BEFORE, AFTER

    @property
    def limit(self) -> int:
        assert self.length is not None
        return self.length + DROPPED

    def width(self, config: ModelConfig) -> int:
        return int(text_config(config)["hidden_size"])

    def positions(self, config: ModelConfig) -> int | None:
        return int(text_config(config)["max_position_embeddings"])

    def longest(self, config: ModelConfig) -> int:
        return self.limit

    def tokenizer_class(self) -> type[PreTrainedTokenizerBase]:
        from transformers import Qwen2Tokenizer

        return Qwen2Tokenizer

    def read_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        tokenizer = super().read_tokenizer(folder)
        if (count := len(tokenizer(BEFORE).input_ids)) != DROPPED:
            raise UserError(
                f"{folder} makes {count} tokens of the beginning of Qwen-Image's template, whose tokenizer makes "
                f"{DROPPED}. Use the tokenizer of the model's own pipeline"
            )
        return tokenizer

    def text(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        return f"{BEFORE}{prompt or NOTHING}{AFTER}"

    def counts(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[int]:
        return [count - DROPPED for count in super().counts(tokenizer, prompts)]

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Tokens:
        found = tokenizer(
            [self.text(tokenizer, prompt) for prompt in prompts],
            padding=True,
            padding_side="right",
            max_length=self.limit,
            truncation=True,
            return_tensors="pt",
        )
        return Tokens(found.input_ids, found.attention_mask.bool())

    def open(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        changes: EncoderChanges | None = None,
    ) -> OpenEncoder:
        from simpletune.models.text.layered_qwen25 import LayeredQwen25

        return LayeredQwen25(part, dtype, device, changes=changes, dropped=DROPPED)

    def open_empty(self, part: Part, dtype: torch.dtype, device: torch.device) -> OpenEncoder:
        from simpletune.models.text.layered import EmptyTensors
        from simpletune.models.text.layered_qwen25 import LayeredQwen25

        opened = LayeredQwen25(part, dtype, device, lambda model: EmptyTensors(model, dtype), dropped=DROPPED)
        opened.model.to("meta")  # accelerate creates its empty weights on the CPU under fake tensors
        return opened


def text_config(config: ModelConfig) -> ModelConfig:
    """Return the settings of the text part, which older files have beside those of the whole."""
    return {**config, **config.get("text_config", {})}
