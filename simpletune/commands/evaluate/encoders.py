"""How alike are two pictures, or a picture and a prompt, to DINO, DINOv2, CLIP and SigLIP?

The interface of encoders, how their papers prepare pictures (with Pillow's antialiased filters), and how an encoder is
found by name. A new kind takes a class here, and a line in ``KINDS``.

Shapes: n pictures or prompts, d width of an embedding, s side of an encoder's input in pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from simpletune.data.demo import ENCODERS
from simpletune.models.shared.transformers_folder import ModelFolder, find_folder
from simpletune.system.model_folder import fingerprint, weight_files
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling

Norm = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and standard deviation of red, green and blue."""

IMAGENET: Norm = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP: Norm = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # arXiv:2103.00020's code
HALF: Norm = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

TRAINED, SHORTER = 224, 256
"""Side of the pictures that both papers of DINO evaluate on, and length of the shorter side before cropping."""
FIRST_VOCABULARY = 32_000
"""Tokens of SigLIP; SigLIP 2 has Gemma's 256,000."""
EXAMPLES = "facebook/dino-vits16 or openai/clip-vit-large-patch14"


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

    def load(self, device: torch.device) -> ImageEncoder:
        return self.kind(self, device)


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
        self.about = about
        self.device = device
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
    def pixels(self, images: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Scale, crop and normalise pictures as the encoder's paper does."""

    @abstractmethod
    def embed(self, pixels: Tensor) -> Tensor:  # [n, 3, s, s] -> [n, d]
        """Embed pictures prepared by `pixels`."""

    def _embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d]
        """Embed prompts, where ``reads_prompts`` is set."""
        raise UserError(f"{self.about.name} is a {self.name} encoder, which reads no prompts. Use CLIP or SigLIP")

    @torch.no_grad()
    def embed_images(self, images: Sequence[Image.Image]) -> Tensor:  # [n, d], fp32 on the CPU
        """Embed pictures. Raises UserError if an embedding is not finite."""
        # One at a time: in a batch the last bits of an embedding would depend on its neighbours.
        return self._finite([self.embed(self.pixels([image]).to(self.device)) for image in images])

    @torch.no_grad()
    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d], fp32 on the CPU
        """Embed prompts. Raises UserError if the encoder reads pictures only, or an embedding is not finite."""
        return self._finite([self._embed_prompts([prompt]) for prompt in prompts])

    def _finite(self, parts: Sequence[Tensor]) -> Tensor:
        found = torch.cat([part.float().cpu() for part in parts])
        if not bool(found.isfinite().all()):
            raise UserError(
                f"{self.about.place.folder}: its embeddings are not finite. Its weights are damaged: download it again"
            )
        return found


def scale_and_crop(image: Image.Image, shorter: int, side: int) -> Image.Image:
    """Scale a picture's shorter side by a bicubic filter, keeping its aspect ratio, and crop the centre square;
    all in pixels."""
    width, height = image.size
    scale = shorter / min(width, height)
    # as torchvision, which the papers' code uses: round the longer side down to whole pixels
    size = (shorter, int(height * scale)) if width <= height else (int(width * scale), shorter)
    scaled = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    # as torchvision's CenterCrop, too; transformers' processor of CLIP rounds down, which may be a pixel beside this
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    return scaled.crop((left, top, left + side, top + side))


def normalise(images: Sequence[Image.Image], norm: Norm) -> Tensor:  # [n, 3, s, s]
    """Stack pictures of one size and normalise their values."""
    values = torch.from_numpy(np.stack([np.asarray(image, dtype=np.float32) for image in images]))
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in norm)
    return (values.permute(0, 3, 1, 2) / 255 - mean) / deviation


class Dino(ImageEncoder):
    """DINO (arXiv:2104.14294) in transformers' ``ViTModel``, such as facebook/dino-vits16."""

    name = "dino"
    classes = ("ViTModel", "ViTConfig")
    options: ClassVar[Mapping[str, object]] = {"add_pooling_layer": False}  # DINO did not train the pooler
    about_preprocessing = "shorter side 256 of 224 bicubic, centre, ImageNet's mean and deviation"

    @staticmethod
    def side(config: object) -> int:
        """Return the side that the model's position embeddings were trained for."""
        return int(config.image_size)  # type: ignore[attr-defined]

    def pixels(self, images: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Scale the shorter side to s x 256 / 224, and crop the centre."""
        side = self.side(self.model.config)
        cut = [scale_and_crop(image, round(side * SHORTER / TRAINED), side) for image in images]
        return normalise(cut, IMAGENET)

    def embed(self, pixels: Tensor) -> Tensor:  # [n, 3, s, s] -> [n, d]
        """Return the class token after the last layer's norm."""
        return self.model(pixel_values=pixels).last_hidden_state[:, 0]


class Dino2(Dino):
    """DINOv2 (arXiv:2304.07193), with or without registers, such as facebook/dinov2-base."""

    name = "dinov2"
    classes = ("AutoModel", "AutoConfig")
    options: ClassVar[Mapping[str, object]] = {}

    @staticmethod
    def side(config: object) -> int:
        """Return 224 as in the paper: the models name 518, the size at the end of training, but interpolate."""
        return min(int(config.image_size), TRAINED)  # type: ignore[attr-defined]


class Clip(ImageEncoder):
    """CLIP (arXiv:2103.00020) in transformers' ``CLIPModel``, such as openai/clip-vit-large-patch14."""

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

    def pixels(self, images: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Scale the shorter side to s, and crop the centre."""
        side = self.side(self.model.config)
        return normalise([scale_and_crop(image, side, side) for image in images], CLIP)

    def embed(self, pixels: Tensor) -> Tensor:  # [n, 3, s, s] -> [n, d]
        """Return the projected embedding of pictures."""
        return unwrap(self.model.get_image_features(pixel_values=pixels))

    def _embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d]
        """Return the projected embedding of prompts, cut at the model's length (77 tokens)."""
        length = self.model.config.text_config.max_position_embeddings
        ids = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        return unwrap(self.model.get_text_features(ids.input_ids.to(self.device), ids.attention_mask.to(self.device)))


def unwrap(features: Tensor | BaseModelOutputWithPooling) -> Tensor:
    """Return embeddings, which newer versions of transformers wrap."""
    return features if isinstance(features, Tensor) else features.pooler_output


class Siglip(Clip):
    """SigLIP (arXiv:2303.15343) and, at a fixed size, SigLIP 2 (arXiv:2502.14786) in transformers' ``SiglipModel``,
    such as google/siglip2-base-patch16-224."""

    name = "siglip"
    classes = ("SiglipModel", "SiglipConfig")
    about_preprocessing = "squashed to a square, values -1 to 1; prompts in lower case, padded to 64 tokens"

    def pixels(self, images: Sequence[Image.Image]) -> Tensor:  # [n, 3, s, s]
        """Squash pictures to a square, as both papers do: by a bicubic filter for SigLIP's published models, by a
        bilinear one for SigLIP 2's, recognised by their vocabulary."""
        side, words = self.side(self.model.config), self.model.config.text_config.vocab_size
        chosen = Image.Resampling.BICUBIC if words == FIRST_VOCABULARY else Image.Resampling.BILINEAR
        squares = [image.convert("RGB").resize((side, side), chosen) for image in images]
        return normalise(squares, HALF)

    def _embed_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d]
        """Return the embedding of prompts in lower case; padding is not masked, because it was not in training."""
        length = self.model.config.text_config.max_position_embeddings
        lower = [prompt.lower() for prompt in prompts]
        ids = self.tokenizer(lower, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return unwrap(self.model.get_text_features(ids.input_ids.to(self.device)))


KINDS: dict[str, type[ImageEncoder]] = {
    "vit": Dino,
    "dinov2": Dino2,
    "dinov2_with_registers": Dino2,
    "clip": Clip,
    "siglip": Siglip,
}
"""The class of each ``model_type`` in a config.json. SigLIP 2 at a fixed size has SigLIP's type."""


def find_encoder(name: str, option: str = "--encoders", kinds: Collection[str] = ()) -> EncoderInfo:
    """Find an encoder by folder, hub name or demo name (``demo:tiny-dino``); load no weights.

    Messages name the option, which accepts encoders of these names; empty: all.
    """
    if name.startswith("demo:"):
        if name not in ENCODERS:
            raise UserError(f"{option}: {name}: unknown demo name. Use one of {', '.join(ENCODERS)}")
        place = ModelFolder(ENCODERS[name], option, "encoder")
    else:
        place = find_folder(name, option, "encoder", "facebook/dino-vits16")
    kind = KINDS[place.model_type(KINDS, EXAMPLES)]
    if kinds and kind.name not in kinds:
        raise UserError(f"{option}: {name} is a {kind.name} model. Use one of {', '.join(kinds)}")
    place.refuse_pickles()
    headers = [read_header(file) for file in weight_files(place.folder)]
    shapes = [entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"]
    parameters = sum(math.prod(shape) for shape in shapes)
    return EncoderInfo(name, place, kind, fingerprint(place.folder), parameters)
