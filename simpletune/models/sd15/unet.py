"""Build the UNet, draw random weights for it, and predict with it.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, t = 77 text tokens, e the text's width.
"""

from __future__ import annotations

from typing import cast

import torch
from accelerate import init_empty_weights
from diffusers import UNet2DConditionModel
from torch import Tensor

from simpletune.models.sd15.shapes import parameter_shapes, unet_units
from simpletune.models.shared.denoiser import Denoiser, set_units
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.weights import random_weight

SMALL = ("proj_out.weight", "conv2.weight", "conv_out.weight")
"""Layers that end a residual branch or the model, which the original training initialises to zero."""


class RandomUNetTensors:
    """Random weights: each tensor is a function of the seed and its name.

    Weights are normal with standard deviation 1/sqrt(inputs), biases are zero, norms are one. The layers that end a
    residual branch, and the last one, which the original initialises to zero, get a hundredth of that deviation, so
    that gradients flow from the first step.

    Args:
        config: the UNet's ``config.json``.
        seed: the seed of the weights.
    """

    def __init__(self, config: ModelConfig, seed: int):
        self._shapes, self._seed = parameter_shapes(config), seed

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._shapes)

    def get(self, name: str) -> Tensor:
        """Draw one fp32 tensor on the CPU."""
        return random_weight(name, self._shapes[name], self._seed, 0.01 if name.endswith(SMALL) else 1.0)


def empty_unet(config: ModelConfig) -> Denoiser:
    """Build the UNet with all its tensors on the meta device.

    Args:
        config: its ``config.json``.
    """
    with init_empty_weights(include_buffers=True):
        model = UNet2DConditionModel.from_config(config)
    return set_units(cast(Denoiser, model), [unit.name for unit in unet_units(config)], "conv_norm_out")


def predict(
    model: torch.nn.Module,
    z_t: Tensor,  # [b, c, h, w]
    time: Tensor,  # [b], whole numbers from 0 to 999
    prompt_embeds: Tensor,  # [b, t, e]
    dtype: torch.dtype,
) -> Tensor:  # [b, c, h, w]
    """Predict noise or v at z_t.

    The time stays fp32 or an integer, because bf16 and fp16 cannot represent every integer up to 999.

    Args:
        dtype: the type of the activations.
    """
    return cast(
        Tensor,
        model(sample=z_t.to(dtype), timestep=time, encoder_hidden_states=prompt_embeds.to(dtype), return_dict=False)[0],
    )
