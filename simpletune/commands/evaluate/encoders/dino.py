"""DINO (arXiv:2104.14294) and DINOv2 (arXiv:2304.07193): the class token of a vision transformer's last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PIL import Image
from torch import Tensor

from simpletune.commands.evaluate.encoders.encoder import EncoderInfo, ImageEncoder
from simpletune.commands.evaluate.encoders.preprocessing import IMAGENET, normalise, scaled_and_cut
from simpletune.commands.evaluate.encoders.weights import complete, empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINED, SHORTER = 224, 256
"""Side of the pictures that both papers evaluate on, and length of the shorter side before cropping."""


class Dino(ImageEncoder):
    """DINO in transformers' ``ViTModel``, such as facebook/dino-vits16."""

    about_preprocessing = "shorter side 256 of 224 bicubic, centre, ImageNet's mean and deviation"

    @staticmethod
    def empty(about: EncoderInfo) -> PreTrainedModel:
        """Build the model from its configuration alone."""
        from transformers import ViTConfig, ViTModel

        return empty_model(ViTModel, ViTConfig, about, add_pooling_layer=False)

    @staticmethod
    def load(about: EncoderInfo) -> PreTrainedModel:
        """Load the model from its folder without its pooler, which DINO did not train."""
        from transformers import ViTModel

        return complete(ViTModel, about, add_pooling_layer=False)

    @staticmethod
    def side(config: object) -> int:
        """Return the side that the model's position embeddings were trained for."""
        return int(config.image_size)  # type: ignore[attr-defined]

    def pixels(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Scale the shorter side to s x 256 / 224, and crop the centre."""
        side = self.side(self.model.config)
        cut = [scaled_and_cut(picture, round(side * SHORTER / TRAINED), side) for picture in pictures]
        return normalise(cut, IMAGENET)

    def embed(self, pixels: Tensor) -> Tensor:  # [n, 3, s, s] -> [n, d]
        """Return the class token after the last layer's norm."""
        return self.model(pixel_values=pixels).last_hidden_state[:, 0]


class Dino2(Dino):
    """DINOv2, with or without registers, such as facebook/dinov2-base."""

    @staticmethod
    def empty(about: EncoderInfo) -> PreTrainedModel:
        """Build the model from its configuration alone."""
        from transformers import AutoConfig, AutoModel

        return empty_model(AutoModel, AutoConfig, about)

    @staticmethod
    def load(about: EncoderInfo) -> PreTrainedModel:
        """Load the model from its folder."""
        from transformers import AutoModel

        return complete(AutoModel, about)

    @staticmethod
    def side(config: object) -> int:
        """Return 224 as in the paper: the models name 518, the size at the end of training, but interpolate."""
        return min(int(config.image_size), TRAINED)  # type: ignore[attr-defined]
