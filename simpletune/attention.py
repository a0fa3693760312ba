"""Which of PyTorch's attention kernels runs: the one that is asked for, or found out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletune.config import TrainConfig
from simpletune.data.buckets import Size
from simpletune.options import UserError
from simpletune.speed import Kernel
from simpletune.terminal import say

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextmanager
def attention_by(kernel: Kernel) -> Iterator[None]:
    """Within this context attention is computed by this kernel alone; auto: by PyTorch's choice."""
    if kernel == "auto":
        yield
        return
    with sdpa_kernel(BACKENDS[kernel]):
        yield


def usable(kernel: Kernel, heads: int, tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that SD3's attention of this size takes: queries, keys and values alike, no mask, no dropout.

    Args:
        kernel: what is asked for.
        heads: of the model.
        tokens: of picture and text together.
        width: of a head.
        device: where it runs.
        dtype: of the products.

    Raises:
        UserError: the one that is asked for cannot run here.
    """
    q = torch.zeros(1, heads, tokens, width, device=device, dtype=dtype, requires_grad=True)
    if kernel == "math":
        return kernel  # it can everything; trying it would take the square of the tokens
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
    by_number: dict[Any, str] = {int(backend.value): name for name, backend in BACKENDS.items()}
    return by_number.get(int(torch._fused_sdp_choice(q, q, q)), "math")


def attention_of(config: TrainConfig, size: Size, device: torch.device) -> str:
    """The kernel that computes attention, found out with a run's own shapes, and said.

    Raises:
        UserError: the one that ``speed.attention`` asks for cannot run here.
    """
    shape, precision = config.model.known_config(), config.precision
    tokens = config.model.text_tokens + math.prod(side // (8 * shape["patch_size"]) for side in size)
    dtype = torch.bfloat16 if precision.autocast else precision.compute_dtype()
    heads, width = shape["num_attention_heads"], shape["attention_head_dim"]
    found = usable(config.speed.attention, heads, tokens, width, device, dtype)
    say(f"attend  by the {found} kernel (speed.attention {config.speed.attention})")
    return found
