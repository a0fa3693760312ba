"""Qwen3's layers as its model calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import create_causal_mask

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.text.encoder import EncoderChanges
from simpletune.models.text.layered import LayeredEncoder, Tensors


class LayeredQwen3(LayeredEncoder):
    """A Qwen3 whose weights stay in their files; ``taps`` as for ``LayeredEncoder``."""

    title: ClassVar = "Qwen3"
    embeddings: ClassVar = ("model.embed_tokens.weight", "lm_head.weight")
    blocks: ClassVar = "model.layers"
    norm: ClassVar = "model.norm"

    def __init__(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tensors: Callable[[nn.Module], Tensors] | None = None,
        changes: EncoderChanges | None = None,
        taps: Sequence[int] = (),
    ):
        super().__init__(part, dtype, device, tensors, changes)
        config: Any = self.model.config
        self.taps = [tap if tap > 0 else config.num_hidden_layers + 1 + tap for tap in taps]

    def build(self, config: ModelConfig) -> nn.Module:
        return Qwen3ForCausalLM(Qwen3Config.from_dict(config))

    def call(self, block: nn.Module, x: Tensor, mask: Tensor | None, state: dict[str, Any]) -> Tensor:
        return call_layer(self.model.model, block, x, mask)


def call_layer(model: Any, block: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Run a layer of one of Qwen's decoders as ``model`` does, which has its settings and its positions."""
    places = torch.arange(x.shape[1], device=x.device)[None]
    seen = create_causal_mask(config=model.config, inputs_embeds=x, attention_mask=mask, past_key_values=None)
    found: Tensor = block(x, attention_mask=seen, position_ids=places, position_embeddings=model.rotary_emb(x, places))
    return found
