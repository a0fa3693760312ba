"""Which attention kernel runs: the one that is asked for, or found out; and what a step on the CPU does otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletune.config.schema import TrainConfig
from simpletune.models.sizes import Size
from simpletune.models.transformer import Transformer
from simpletune.options import UserError
from simpletune.speed import Kernel
from simpletune.system.console import say
from simpletune.system.devices import keep_freed_memory

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PRODUCTS: Final = "products"
MOST_PROBABILITIES = 16 * 2**20
"""Bytes that plain products may keep for each block: in larger ones they were not measured."""


@contextmanager
def attention_by(kernel: Kernel) -> Iterator[None]:
    """Within this context PyTorch's attention is computed by this kernel alone; auto, products: by its own choice."""
    if kernel in ("auto", PRODUCTS):
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
    if kernel == "math":
        return kernel  # it can everything; trying it would take the square of the tokens
    if kernel == PRODUCTS:
        if device.type != "cpu":
            raise UserError(f"speed.attention: products is for the CPU, and the run is on {device.type}. Use auto")
        return kernel
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
    by_number: dict[Any, str] = {int(backend.value): name for name, backend in BACKENDS.items()}
    return by_number.get(int(torch._fused_sdp_choice(q, q, q)), "math")


def multiplies_bf16(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these are products in bf16 on a CPU that has an instruction for them."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    known = torch.cpu.get_capabilities()
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def settle_attention(config: TrainConfig, transformer: Transformer, size: Size, device: torch.device) -> str:
    """Find out with a run's own shapes which kernel computes attention, and say it; set the blocks up for the CPU.

    Args:
        config: of the run.
        transformer: with its adapter; on the CPU, for products in bf16, its blocks are changed.
        size: of the largest pictures.
        device: where it runs.

    Raises:
        UserError: the kernel that ``speed.attention`` asks for cannot run here.
    """
    shape, precision = config.model.known_config(), config.precision
    tokens = config.model.text_tokens + math.prod(side // (8 * shape["patch_size"]) for side in size)
    dtype = precision.product_dtype()
    heads, width = shape["num_attention_heads"], shape["attention_head_dim"]
    asked, compiled = config.speed.attention, config.speed.compile
    few = config.train.batch_size * heads * tokens**2 * dtype.itemsize <= MOST_PROBABILITIES
    by_products = asked == "auto" and few and not compiled and multiplies_bf16(device, dtype)
    found = usable(PRODUCTS if by_products else asked, heads, tokens, width, device, dtype)
    if device.type == "cpu":
        keep_freed_memory()
        if not compiled and (dtype == torch.bfloat16 or found == PRODUCTS):
            from simpletune.step.gelu_table import take_table
            from simpletune.step.joint_attention import take_joint_attention

            take_joint_attention(transformer.transformer_blocks, found == PRODUCTS)
            take_table(transformer.transformer_blocks)
    say(f"attend  by the {found} kernel (speed.attention {asked})")
    return found
