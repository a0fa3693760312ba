"""From a plan's draws to tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from simpletune.data.plan import Draw
from simpletune.prepare import LatentCache, TextCache
from simpletune.streams import stream


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device, in fp32 but for the text."""

    z_0: Tensor  # [b, c, h, w]
    noise: Tensor  # [b, c, h, w]
    sigma: Tensor  # [b]
    prompt_embeds: Tensor  # [b, t, e]
    pooled: Tensor  # [b, p]
    names: tuple[str, ...]
    """The pictures' names, for messages."""


class Feed:
    """Loads micro-batches.

    Args:
        text: prompt embeddings by prompt.
        latents: latents by cut.
        seed: ``train.seed``.
        device: where to.
    """

    def __init__(self, text: TextCache, latents: LatentCache, seed: int, device: torch.device):
        self.text, self.latents, self.seed, self.device = text, latents, seed, device

    def load(self, draws: list[Draw]) -> Batch:
        """The tensors of one micro-batch; noise is drawn in fp32 on the CPU from its key, the same on every device."""
        z_0 = torch.stack([self.latents.load(draw.view) for draw in draws])
        noise = torch.stack([self._noise(draw, z_0.shape[1:]) for draw in draws])
        embeddings = [self.text.load(draw.caption) for draw in draws]
        return Batch(
            z_0=z_0.to(self.device),
            noise=noise.to(self.device),
            sigma=torch.tensor([draw.sigma for draw in draws], dtype=torch.float32).to(self.device),
            prompt_embeds=torch.stack([embeds for embeds, _ in embeddings]).to(self.device),
            pooled=torch.stack([pooled for _, pooled in embeddings]).to(self.device),
            names=tuple(draw.view.picture.name for draw in draws),
        )

    def _noise(self, draw: Draw, shape: torch.Size) -> Tensor:
        return torch.from_numpy(stream(self.seed, *draw.noise_key).standard_normal(tuple(shape), dtype="float32"))
