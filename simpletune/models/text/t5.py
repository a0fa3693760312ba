"""T5's encoder, which runs layer by layer: its 4.7 billion parameters need no larger card than training does.

SD3 uses it without an attention mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.text.encoder import EncoderChanges, OpenEncoder, TextEncoder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class T5Encoder(TextEncoder):
    """A T5 encoder."""

    kind: ClassVar[str] = "T5"

    def width(self, config: ModelConfig) -> int:
        return int(config["d_model"])

    def tokenizer_class(self) -> type[PreTrainedTokenizerBase]:
        from transformers import T5TokenizerFast

        return T5TokenizerFast

    def open(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        changes: EncoderChanges | None = None,
    ) -> OpenEncoder:
        from simpletune.models.text.layered_t5 import LayeredT5

        return LayeredT5(part, dtype, device, changes=changes)

    def open_empty(self, part: Part, dtype: torch.dtype, device: torch.device) -> OpenEncoder:
        from simpletune.models.text.layered import EmptyTensors
        from simpletune.models.text.layered_t5 import LayeredT5

        opened = LayeredT5(part, dtype, device, lambda model: EmptyTensors(model, dtype))
        opened.model.to("meta")  # accelerate creates its empty weights on the CPU under fake tensors
        return opened
