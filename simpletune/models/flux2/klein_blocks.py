"""klein's blocks with SwiGLU as a single operator (engine/kernels/swiglu.py); on the CPU they give diffusers' bits."""

from __future__ import annotations

from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from torch import Tensor, nn

from simpletune.engine.kernels.swiglu import swiglu


class SwiGLU(Flux2SwiGLU):
    """Activation of a feed-forward network, or of that part of a parallel block."""

    def forward(self, x: Tensor) -> Tensor:  # [b, n, 2 d] -> [b, n, d]
        return swiglu(x)


def use_own_blocks(model: nn.Module) -> None:
    """Convert diffusers' modules to ours in place."""
    for module in model.modules():
        if type(module) is Flux2SwiGLU:
            module.__class__ = SwiGLU
