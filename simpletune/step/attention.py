"""Select PyTorch's attention kernel: the requested one, or PyTorch's own choice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletune.config.schema import TrainConfig
from simpletune.models.buckets import Size
from simpletune.options import UserError
from simpletune.speed import Kernel
from simpletune.system.console import say

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextmanager
def attention_by(kernel: Kernel) -> Iterator[None]:
    """Restrict PyTorch's attention to this kernel within the context; auto leaves the choice to PyTorch."""
    if kernel == "auto":
        yield
        return
    with sdpa_kernel(BACKENDS[kernel]):
        yield


def usable(kernel: Kernel, heads: int, tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> str:
    """Find the kernel for SD3's attention of this size, without mask or dropout.

    Args:
        kernel: the requested kernel, or auto.
        heads: the number of heads.
        tokens: the number of image and text tokens.
        width: the width of a head.
        device: where it runs.
        dtype: the type of products.

    Returns:
        The requested kernel; for auto the one that PyTorch chooses.

    Raises:
        UserError: the requested kernel cannot run here.
    """
    if kernel == "math":
        return kernel  # always available; a trial would take memory quadratic in the tokens
    q = torch.zeros(1, heads, tokens, width, device=device, dtype=dtype, requires_grad=True)
    if kernel != "auto":
        try:
            with attention_by(kernel):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"speed.attention: {kernel} cannot compute {heads} heads of {tokens} x {width} in {dtype} on "
                f"{device.type} ({reason}). Use auto or math"
            ) from None
        return kernel
    by_number = {int(backend.value): name for name, backend in BACKENDS.items()}
    return by_number.get(int(torch._fused_sdp_choice(q, q, q)), "math")


def settle_attention(config: TrainConfig, size: Size, device: torch.device) -> str:
    """Determine which kernel computes attention for a run's shapes, and log it.

    Args:
        config: the run's configuration.
        size: the size of the largest pictures in pixels.
        device: where it runs.

    Returns:
        The kernel's name.

    Raises:
        UserError: the kernel that ``speed.attention`` requests cannot run here.
    """
    shape, asked = config.model.known_config(), config.speed.attention
    tokens = config.model.text_tokens + math.prod(side // (8 * shape["patch_size"]) for side in size)
    heads, width = shape["num_attention_heads"], shape["attention_head_dim"]
    found = usable(asked, heads, tokens, width, device, config.precision.product_dtype())
    say(f"attend  with the {found} kernel (speed.attention {asked})")
    return found
