"""CLIP (arXiv:2103.00020): pictures and prompts in one space."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from simpletune.commands.evaluate.encoders.encoder import EncoderInfo, ImageEncoder, projected
from simpletune.commands.evaluate.encoders.preprocessing import CLIP, normalise, scaled_and_cut


class Clip(ImageEncoder):
    """CLIP in transformers' ``CLIPModel``, such as openai/clip-vit-large-patch14."""

    reads_prompts = True
    classes = ("CLIPModel", "CLIPConfig")
    about_preprocessing = "shorter side bicubic, centre, CLIP's mean and deviation; prompts cut at 77 tokens"

    def __init__(self, about: EncoderInfo, device: torch.device):
        self.tokenizer = about.place.tokenizer()
        super().__init__(about, device)

    @staticmethod
    def side(config: object) -> int:
        """Return s for a model's configuration."""
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
