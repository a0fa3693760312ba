"""T5's layers as its encoder calls them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel
from transformers.masking_utils import create_bidirectional_mask

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.text.layered import LayeredEncoder


class LayeredT5(LayeredEncoder):
    """A T5 encoder whose weights stay in their files."""

    title: ClassVar = "T5"
    embeddings: ClassVar = ("shared.weight", "encoder.embed_tokens.weight")
    ignored: ClassVar = ("decoder.", "lm_head.")
    blocks: ClassVar = "encoder.block"
    norm: ClassVar = "encoder.final_layer_norm"

    def build(self, config: ModelConfig) -> nn.Module:
        return T5EncoderModel(T5Config.from_dict(config))

    def call(self, block: nn.Module, x: Tensor, mask: Tensor | None, state: dict[str, Any]) -> Tensor:
        config = self.model.encoder.config  # type: ignore[union-attr]
        seen = create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=mask)
        x, state["bias"], _ = block(x, seen, state.get("bias"))  # the first layer computes the position bias for all
        return x
