"""DINO (arXiv:2104.14294) and DINOv2 (arXiv:2304.07193): the class token of a vision transformer's last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from PIL import Image
from torch import Tensor

from simpletune.commands.evaluate.encoders.encoder import IMAGENET, ImageEncoder, normalise, scaled_and_cut

TRAINED, SHORTER = 224, 256
"""Side of the pictures that both papers evaluate on, and length of the shorter side before cropping."""


class Dino(ImageEncoder):
    """DINO in transformers' ``ViTModel``, such as facebook/dino-vits16."""

    name = "dino"
    classes = ("ViTModel", "ViTConfig")
    options: ClassVar[Mapping[str, object]] = {"add_pooling_layer": False}  # DINO did not train the pooler
    about_preprocessing = "shorter side 256 of 224 bicubic, centre, ImageNet's mean and deviation"

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

    name = "dinov2"
    classes = ("AutoModel", "AutoConfig")
    options: ClassVar[Mapping[str, object]] = {}

    @staticmethod
    def side(config: object) -> int:
        """Return 224 as in the paper: the models name 518, the size at the end of training, but interpolate."""
        return min(int(config.image_size), TRAINED)  # type: ignore[attr-defined]
