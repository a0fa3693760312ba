"""BLIP (arXiv:2201.12086): writes a caption, or completes the beginning of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from PIL import Image
from torch import Tensor

from simpletune.commands.caption.captioner import Captioner, CaptionerSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_TOKENS = 16


class Blip(Captioner):
    """BLIP, such as Salesforce/blip-image-captioning-large."""

    names: ClassVar[Mapping[str, str]] = {"blip": "Blip"}
    processor_name = "Blip"  # squashes pictures to a square
    own_prompt = ""

    @staticmethod
    def shape(model: PreTrainedModel) -> CaptionerSizes:
        """Return the sizes at the configured picture size. Each decoder layer caches keys and values of the picture;
        vision layers materialise all attention weights."""
        vision, text = model.config.vision_config, model.config.text_config
        patches = (vision.image_size // vision.patch_size) ** 2 + 1
        cached = 4 * text.num_hidden_layers * text.hidden_size
        widest = 4 * vision.hidden_size + max(2 * vision.intermediate_size, 3 * vision.num_attention_heads * patches)
        return CaptionerSizes(patches, widest, patches + PROMPT_TOKENS, 6 * text.hidden_size, cached, text.vocab_size)

    def inputs(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return pixels and the beginning of the caption; the model replaces the first token and drops the last."""
        pixels = self.processor(list(images), return_tensors="pt")["pixel_values"]  # [n, 3, s, s]
        text = self.model.config.text_config
        words = self.tokenizer(self.prompt, add_special_tokens=False).input_ids if self.prompt else []
        rows = torch.tensor([[text.bos_token_id, *words, text.sep_token_id]] * len(images))
        return {"pixel_values": pixels, "input_ids": rows, "attention_mask": torch.ones_like(rows)}

    def new_ids(self, ids: Tensor, given: Tensor) -> Tensor:  # [n, t], [n, t] -> [n, t]
        """Return the tokens after the beginning, whose last token the model dropped."""
        return ids[:, given.shape[1] - 1 :]

    def end_tokens(self) -> set[int]:
        return {self.model.config.text_config.sep_token_id}
