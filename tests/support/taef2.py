"""TAEF2 (github.com/madebyollin/taesd, MIT): a small trained autoencoder with FLUX.2's latents, which diffusers 0.42.1
cannot read, in the place of an AutoencoderKLFlux2's own encoder and decoder."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2
from safetensors.torch import load_file
from torch import Tensor, nn

NARROW = -30.0  # the posterior's log variance: it gives none


class Block(nn.Module):
    def __init__(self, pools: bool = False):
        super().__init__()
        self.conv = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), conv())
        if pools:
            wide, back = nn.Conv2d(64, 256, 1, bias=False), nn.Conv2d(256, 64, 1, bias=False)
            self.pool = nn.Sequential(wide, nn.GroupNorm(4, 256), nn.ReLU(), back)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pool(x) if hasattr(self, "pool") else x
        return torch.relu(self.conv(x) + x)


def conv(inputs: int = 64, outputs: int = 64, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)


class Encoder(nn.Module):
    """Pictures in -1..1 to a posterior's mean and log variance."""

    def __init__(self) -> None:
        super().__init__()
        levels = [each for last in (False, False, True) for each in
                  (conv(stride=2, bias=False), *(Block(last) for _ in range(3)))]  # fmt: skip
        self.layers = nn.Sequential(conv(3), Block(), *levels, conv(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.layers(x / 2 + 0.5)
        return torch.cat([mean, torch.full_like(mean, NARROW)], 1)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        levels = [each for first in (True, False, False) for each in
                  (*(Block(first) for _ in range(3)), nn.Upsample(scale_factor=2), conv(bias=False))]  # fmt: skip
        self.layers = nn.Sequential(nn.Identity(), conv(32), nn.ReLU(), *levels, Block(), conv(64, 3))

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(torch.tanh(z / 3) * 3) * 2 - 1


def put_into(vae: AutoencoderKLFlux2, folder: Path) -> None:
    """Replace all its layers by TAEF2's; its statistics stay."""
    for name, network in (("encoder", Encoder()), ("decoder", Decoder())):
        network.layers.load_state_dict(load_file(folder / f"taef2_{name}.safetensors"))
        setattr(vae, name, network.eval().requires_grad_(False))
    vae.quant_conv = vae.post_quant_conv = nn.Identity()
