"""Pictures and prompts in one space: CLIP (arXiv:2103.00020), and at a fixed size SigLIP (arXiv:2303.15343) and
SigLIP 2 (arXiv:2502.14786)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from simpletune.commands.evaluate.encoders.encoder import (
    CLIP,
    HALF,
    EncoderInfo,
    ImageEncoder,
    normalise,
    scaled_and_cut,
    squashed,
)

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

FIRST_VOCABULARY = 32_000
"""Tokens of SigLIP; SigLIP 2 has Gemma's 256,000."""


class Clip(ImageEncoder):
    """CLIP in transformers' ``CLIPModel``, such as openai/clip-vit-large-patch14."""

    name = "clip"
    reads_prompts = True
    classes = ("CLIPModel", "CLIPConfig")
    about_preprocessing = "shorter side bicubic, centre, CLIP's mean and deviation; prompts cut at 77 tokens"

    def __init__(self, about: EncoderInfo, device: torch.device):
        self.tokenizer = about.place.tokenizer()
        super().__init__(about, device)

    @staticmethod
    def side(config: object) -> int:
        return int(config.vision_config.image_size)  # type: ignore[attr-defined]

    def pixels(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Scale the shorter side to s, and crop the centre."""
        side = self.side(self.model.config)
        return normalise([scaled_and_cut(picture, side, side) for picture in pictures], CLIP)

    def embed(self, pixels: Tensor) -> Tensor:  # [n, 3, s, s] -> [n, d]
        """Return the projected embedding of pictures."""
        return projected(self.model.get_image_features(pixel_values=pixels))

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d]
        """Return the projected embedding of prompts, cut at the model's length (77 tokens)."""
        length = self.model.config.text_config.max_position_embeddings
        ids = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        return projected(
            self.model.get_text_features(ids.input_ids.to(self.device), ids.attention_mask.to(self.device))
        )


def projected(features: Tensor | BaseModelOutputWithPooling) -> Tensor:
    """Return embeddings, which newer versions of transformers wrap."""
    return features if isinstance(features, Tensor) else features.pooler_output


class Siglip(Clip):
    """SigLIP in transformers' ``SiglipModel``, such as google/siglip2-base-patch16-224."""

    name = "siglip"
    classes = ("SiglipModel", "SiglipConfig")
    about_preprocessing = "squashed to a square, values -1 to 1; prompts in lower case, padded to 64 tokens"

    def pixels(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Squash pictures to a square, as both papers do: by a bicubic filter for SigLIP's published models, by a
        bilinear one for SigLIP 2's, recognised by their vocabulary."""
        side, words = self.side(self.model.config), self.model.config.text_config.vocab_size
        chosen = Image.Resampling.BICUBIC if words == FIRST_VOCABULARY else Image.Resampling.BILINEAR
        return normalise([squashed(picture, side, chosen) for picture in pictures], HALF)

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d]
        """Return the embedding of prompts in lower case; padding is not masked, because it was not in training."""
        length = self.model.config.text_config.max_position_embeddings
        lower = [prompt.lower() for prompt in prompts]
        ids = self.tokenizer(lower, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return projected(self.model.get_text_features(ids.input_ids.to(self.device)))
