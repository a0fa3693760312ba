"""Interface of encoders.

Shapes: n pictures or prompts, d width of an embedding, s side of an encoder's input in pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from PIL import Image
from torch import Tensor

from simpletune.models.shared.transformers_folder import ModelFolder
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling


@dataclass(frozen=True)
class EncoderInfo:
    """An encoder that is not loaded yet.

    Args:
        name: the folder or hub name that the user gave.
        folder: where its files are.
        kind: ``dino``, ``dinov2``, ``clip`` or ``siglip``.
        digest: digest of its configuration and weights.
        parameters: number of weights in its files.
        option: the option that named it, for messages.
    """

    name: str
    folder: Path
    kind: str
    digest: str
    parameters: int
    option: str = "--encoders"

    @property
    def place(self) -> ModelFolder:
        """Its folder, with the words for messages."""
        return ModelFolder(self.folder, self.option, "encoder")

    @property
    def title(self) -> str:
        """Name in tables: the last part of the hub name or folder."""
        return self.name.rstrip("/").rpartition("/")[2].removeprefix("demo:") or self.kind


class ImageEncoder(ABC):
    """A frozen model in fp32 that embeds pictures.

    Args:
        about: the encoder.
        device: device to load onto.

    Raises:
        UserError: the folder is damaged.
    """

    reads_prompts: ClassVar[bool] = False
    about_preprocessing: ClassVar[str]
    classes: ClassVar[tuple[str, str]]
    """The names of transformers' classes of the model and its configuration."""
    options: ClassVar[Mapping[str, object]] = {}
    """Arguments of the model's class."""

    def __init__(self, about: EncoderInfo, device: torch.device):
        self.about, self.device = about, device
        self.model: PreTrainedModel = self.load(about).to(device)

    @classmethod
    def empty(cls, about: EncoderInfo) -> PreTrainedModel:
        """Build the model from its configuration alone, with uninitialised weights on torch's current device.

        Raises:
            UserError: the configuration does not describe such a model.
        """
        import transformers

        kind, config = (getattr(transformers, name) for name in cls.classes)
        return about.place.empty(kind, config, **cls.options)

    @classmethod
    def load(cls, about: EncoderInfo) -> PreTrainedModel:
        """Load the model from its folder in fp32, frozen.

        Raises:
            UserError: weights are missing, have other shapes than the configuration, or cannot be read.
        """
        import transformers

        return about.place.model(getattr(transformers, cls.classes[0]), torch.float32, **cls.options)

    @staticmethod
    @abstractmethod
    def side(config: object) -> int:
        """Return s for a model's configuration."""

    @abstractmethod
    def pixels(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Scale, crop and normalise pictures as the encoder's paper does."""

    @abstractmethod
    def embed(self, pixels: Tensor) -> Tensor:  # [n, 3, s, s] -> [n, d]
        """Embed prepared pictures."""

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d]
        """Embed prompts.

        Raises:
            UserError: the encoder reads pictures only.
        """
        raise UserError(f"{self.about.name} is a {self.about.kind} encoder, which reads no prompts. Use CLIP or SigLIP")

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
                f"{self.about.folder}: its embeddings are not finite. Its weights are damaged: download it again"
            )
        return found


def projected(features: Tensor | BaseModelOutputWithPooling) -> Tensor:
    """Return embeddings, which newer versions of transformers wrap."""
    return features if isinstance(features, Tensor) else features.pooler_output
