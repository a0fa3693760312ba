"""The text layers of Qwen2.5-VL as its model calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.shared.transformers_folder import quiet
from simpletune.models.text.encoder import BATCH, EncoderChanges, Tokens
from simpletune.models.text.layered import LayeredEncoder, Tensors
from simpletune.models.text.layered_qwen3 import call_layer


class LayeredQwen25(LayeredEncoder):
    """The text part of a Qwen2.5-VL whose weights stay in their files, without the states of its first ``dropped``
    tokens."""

    title: ClassVar = "Qwen2.5-VL"
    within: ClassVar = ("model.language_model.", "model.")  # the second in files that transformers writes
    embeddings: ClassVar = ("embed_tokens.weight",)
    blocks: ClassVar = "layers"
    norm: ClassVar = "norm"

    def __init__(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tensors: Callable[[nn.Module], Tensors] | None = None,
        changes: EncoderChanges | None = None,
        dropped: int = 0,
    ):
        super().__init__(part, dtype, device, tensors, changes)
        self.dropped = dropped

    def build(self, config: ModelConfig) -> nn.Module:
        with quiet():  # it warns of the sections of its own positions
            return Qwen2_5_VLTextModel(Qwen2_5_VLConfig.from_dict(config).get_text_config())

    def call(self, block: nn.Module, x: Tensor, mask: Tensor | None, state: dict[str, Any]) -> Tensor:
        return call_layer(self.model, block, x, mask)

    def encode(self, tokens: Tokens, batch_size: int = BATCH) -> Iterator[dict[str, Tensor]]:
        for found in super().encode(tokens, batch_size):
            yield {"hidden": found["hidden"][self.dropped :]}
