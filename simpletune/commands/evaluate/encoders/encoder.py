"""Interface of encoders, and how their papers prepare pictures, with Pillow's antialiased filters.

Shapes: n pictures or prompts, d width of an embedding, s side of an encoder's input in pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from simpletune.models.shared.transformers_folder import ModelFolder
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Norm = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and standard deviation of red, green and blue."""

IMAGENET: Norm = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP: Norm = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # arXiv:2103.00020's code
HALF: Norm = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class EncoderInfo:
    """An encoder that is not loaded yet."""

    name: str  # the folder or hub name that the user gave
    place: ModelFolder
    kind: type[ImageEncoder]
    digest: str  # of its configuration and weights
    parameters: int  # number of weights in its files

    @property
    def title(self) -> str:
        """Name in tables: the last part of the hub name or folder."""
        return self.name.rstrip("/").rpartition("/")[2].removeprefix("demo:") or self.kind.name


class ImageEncoder(ABC):
    """A frozen model in fp32 that embeds pictures.

    Raises:
        UserError: weights are missing, have other shapes than the configuration, or cannot be read.
    """

    name: ClassVar[str]
    reads_prompts: ClassVar[bool] = False
    about_preprocessing: ClassVar[str]
    classes: ClassVar[tuple[str, str]]
    """The names of transformers' classes of the model and its configuration."""
    options: ClassVar[Mapping[str, object]] = {}
    """Arguments of the model's class."""

    def __init__(self, about: EncoderInfo, device: torch.device):
        import transformers

        kind = getattr(transformers, self.classes[0])
        self.about, self.device = about, device
        self.model: PreTrainedModel = about.place.model(kind, torch.float32, **self.options).to(device)

    @classmethod
    def empty(cls, about: EncoderInfo) -> PreTrainedModel:
        """Build the model from its configuration alone, with uninitialised weights on torch's current device."""
        import transformers

        kind, config = (getattr(transformers, name) for name in cls.classes)
        return about.place.empty(kind, config, **cls.options)

    @staticmethod
    @abstractmethod
    def side(config: object) -> int:
        """Return s for a model's configuration."""

    @abstractmethod
    def pixels(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Scale, crop and normalise pictures as the encoder's paper does."""

    @abstractmethod
    def embed(self, pixels: Tensor) -> Tensor:  # [n, 3, s, s] -> [n, d]
        """Embed pictures prepared by `pixels`."""

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d]
        """Embed prompts, where ``reads_prompts`` is set."""
        raise UserError(f"{self.about.name} is a {self.name} encoder, which reads no prompts. Use CLIP or SigLIP")

    @torch.no_grad()
    def of_pictures(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, d], fp32 on the CPU
        """Embed pictures, one at a time: in a batch the last bits of an embedding would depend on its neighbours.

        Raises:
            UserError: an embedding is not finite.
        """
        return self._finite([self.embed(self.pixels([picture]).to(self.device)) for picture in pictures])

    @torch.no_grad()
    def of_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d], fp32 on the CPU
        """Embed prompts, one at a time.

        Raises:
            UserError: the encoder reads pictures only, or an embedding is not finite.
        """
        return self._finite([self.embed_prompts([prompt]) for prompt in prompts])

    def _finite(self, parts: Sequence[Tensor]) -> Tensor:
        found = torch.cat([part.float().cpu() for part in parts])
        if not bool(found.isfinite().all()):
            raise UserError(
                f"{self.about.place.folder}: its embeddings are not finite. Its weights are damaged: download it again"
            )
        return found


def scaled_and_cut(picture: Image.Image, shorter: int, side: int) -> Image.Image:
    """Scale a picture's shorter side by a bicubic filter, keeping its aspect ratio, and crop the centre square;
    all in pixels."""
    width, height = picture.size
    scale = shorter / min(width, height)
    # as torchvision, which the papers' code uses: round the longer side down to whole pixels
    size = (shorter, int(height * scale)) if width <= height else (int(width * scale), shorter)
    scaled = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    return scaled.crop((left, top, left + side, top + side))


def squashed(picture: Image.Image, side: int, chosen: Image.Resampling) -> Image.Image:
    """Scale a picture to a square by a filter, changing its aspect ratio."""
    return picture.convert("RGB").resize((side, side), chosen)


def normalise(pictures: Sequence[Image.Image], norm: Norm) -> Tensor:  # [n, 3, s, s]
    """Stack pictures of one size and normalise their values."""
    values = torch.from_numpy(np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures]))
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in norm)
    return (values.permute(0, 3, 1, 2) / 255 - mean) / deviation
