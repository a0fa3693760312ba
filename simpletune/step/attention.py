"""Which of PyTorch's attention kernels runs: the one the user asks for, or the one PyTorch chooses."""

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
    """Restrict PyTorch's attention to this kernel within the context; auto: leave PyTorch its choice."""
    if kernel == "auto":
        yield
        return
    with sdpa_kernel(BACKENDS[kernel]):
        yield


def usable(kernel: Kernel, heads: int, tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> str:
    """Find the kernel for SD3's attention of this size: queries, keys and values alike, no mask, no dropout.

    Args:
        kernel: the requested one, or auto.
        heads: of the model.
        tokens: of picture and text together.
        width: of a head.
        device: where it runs.
        dtype: of the products.

    Returns:
        The requested kernel; with auto the one that PyTorch chooses.

    Raises:
        UserError: the requested kernel cannot run here.
    """
    if kernel == "math":
        return kernel  # it always can; trying it would take memory by the square of the tokens
    q = torch.zeros(1, heads, tokens, width, device=device, dtype=dtype, requires_grad=True)
    if kernel != "auto":
        try:
            with attention_by(kernel):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"speed.attention: {kernel} cannot compute {heads} heads of {tokens} x {width} in {dtype} on "
                f"{device.type} ({reason}). Use auto, or math"
            ) from None
        return kernel
    by_number = {int(backend.value): name for name, backend in BACKENDS.items()}
    return by_number.get(int(torch._fused_sdp_choice(q, q, q)), "math")


def settle_attention(config: TrainConfig, size: Size, device: torch.device) -> str:
    """Find out with a run's own shapes which kernel computes attention, and say so.

    Args:
        config: of the run.
        size: of the largest pictures, in pixels.
        device: where it runs.

    Returns:
        The kernel's name.

    Raises:
        UserError: the kernel that ``speed.attention`` asks for cannot run here.
    """
    shape, asked = config.model.known_config(), config.speed.attention
    tokens = config.model.text_tokens + math.prod(side // (8 * shape["patch_size"]) for side in size)
    heads, width = shape["num_attention_heads"], shape["attention_head_dim"]
    found = usable(asked, heads, tokens, width, device, config.precision.product_dtype())
    say(f"attend  by the {found} kernel (speed.attention {asked})")
    return found
