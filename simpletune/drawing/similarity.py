"""Measure how pictures differ and how well they match prompts: plain distances, and scores by chosen encoders.

Shapes: n pictures, d width of an encoder's embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from simpletune.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling

# Means and deviations (red, green, blue) of CLIP (arXiv:2103.00020) and of ImageNet.
CLIP_NORM = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET_NORM = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

Measure = Literal["difference_from_base", "latent_distance_from_base", "clip_prompt", "clip_base", "dino_base"]


class ModelFigures(TypedDict):
    """One model's times and its pictures' distances from the base's, as in ``compare.json``."""

    weights: str
    title: str
    precision: str
    seconds_per_picture: float
    seconds: dict[str, float]
    difference_from_base: list[float]
    latent_distance_from_base: list[float]
    clip_prompt: NotRequired[list[float]]
    clip_base: NotRequired[list[float]]
    dino_base: NotRequired[list[float]]


def pixel_difference(a: Image.Image, b: Image.Image) -> float:
    """Return the mean absolute difference of two pictures' values, 0 to 1."""
    return float(np.abs(np.asarray(a, dtype=np.float32) - np.asarray(b, dtype=np.float32)).mean() / 255)


def latent_distance(a: Tensor, b: Tensor) -> float:
    """Return the root mean square difference of two latents; latents have a variance of about 1."""
    return float((a - b).square().mean().sqrt())


def pixels_for(pictures: Sequence[Image.Image], side: int, norm: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    """Scale, centre-crop and normalise pictures for an encoder: [n, 3, side, side]."""
    from PIL import ImageOps

    fitted = [ImageOps.fit(p.convert("RGB"), (side, side), Image.Resampling.BICUBIC) for p in pictures]
    values = torch.from_numpy(np.stack([np.asarray(p, dtype=np.float32) for p in fitted])).permute(0, 3, 1, 2) / 255
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in norm)
    return (values - mean) / deviation


class Clip:
    """Compare pictures with prompts and other pictures by a CLIP model (arXiv:2104.08718, without its factor).

    Args:
        name: a folder or a hub name; only safetensors files are read.
        device: to load onto.

    Raises:
        UserError: the model is not a CLIP model.
    """

    def __init__(self, name: str, device: torch.device):
        from transformers import AutoTokenizer, CLIPModel

        self.model = _load(CLIPModel, "--clip", name).to(device)
        if self.model.config.model_type != "clip":
            raise UserError(f"--clip: {name} is a {self.model.config.model_type} model. Use a CLIP model")
        self.tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=Path(name).is_dir())
        self.device = device

    @torch.no_grad()
    def of_prompts(self, prompts: Sequence[str]) -> Tensor:  # [n, d], of length 1
        """Embed prompts; CLIP reads the first 77 tokens."""
        length = self.model.config.text_config.max_position_embeddings
        ids = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        return _unit(self.model.get_text_features(**ids.to(self.device)))

    @torch.no_grad()
    def of_pictures(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, d], of length 1
        """Pictures."""
        side = self.model.config.vision_config.image_size
        return _unit(self.model.get_image_features(pixels_for(pictures, side, CLIP_NORM).to(self.device)))


class Dino:
    """Compare pictures by a vision transformer's class token (arXiv:2104.14294, 2304.07193).

    Args:
        name: a folder or a hub name; only safetensors files are read.
        device: to load onto.
    """

    def __init__(self, name: str, device: torch.device):
        from transformers import AutoModel

        self.model, self.device = _load(AutoModel, "--dino", name).to(device), device

    @torch.no_grad()
    def of_pictures(self, pictures: Sequence[Image.Image]) -> Tensor:  # [n, d], of length 1
        """Pictures."""
        pixels = pixels_for(pictures, self.model.config.image_size, IMAGENET_NORM)
        return _unit(self.model(pixel_values=pixels.to(self.device)).last_hidden_state[:, 0])


def _load(kind: type[PreTrainedModel], option: str, name: str) -> PreTrainedModel:
    """Load a model with transformers, in fp32, frozen."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model = kind.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, local_files_only=Path(name).is_dir()
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{option}: {name} cannot be loaded ({reason}). Use a model's folder or hub name") from None
    return model.eval().requires_grad_(False)


def _unit(features: Tensor | BaseModelOutputWithPooling) -> Tensor:
    """Normalise embeddings to length 1, on the CPU; newer versions of transformers wrap them."""
    tensor = features if isinstance(features, Tensor) else features.pooler_output
    return F.normalize(tensor.float(), dim=-1).cpu()
