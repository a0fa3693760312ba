"""SigLIP (arXiv:2303.15343) and SigLIP 2 (arXiv:2502.14786) at a fixed size: pictures and prompts in one space."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from simpletune.commands.evaluate.encoders.clip import Clip
from simpletune.commands.evaluate.encoders.encoder import projected
from simpletune.commands.evaluate.encoders.preprocessing import HALF, normalise, squashed

FIRST_VOCABULARY = 32_000
"""Tokens of SigLIP; SigLIP 2 has Gemma's 256,000."""


class Siglip(Clip):
    """SigLIP in transformers' ``SiglipModel``, such as google/siglip2-base-patch16-224."""

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
