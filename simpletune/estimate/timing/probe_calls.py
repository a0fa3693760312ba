"""The single operations that probes.py times, and their operands."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from simpletune.engine.quant.int8_products import dequantise_weight
from simpletune.estimate.timing.stopwatch import Call

ROW = 1024  # width of rows that norms and reductions work on
BLOCK = 64  # nf4's weights per scale


def gather_rows(x: Tensor) -> Tensor:
    """The first rows of a table, chosen by index."""
    return x[torch.zeros(len(x), dtype=torch.int64, device=x.device)]


def norm_gradient(x: Tensor) -> object:
    """The gradient of layer norm's input."""
    mean = x.new_zeros((len(x), 1), dtype=torch.float32)
    mean = mean if x.device.type == "cuda" else mean.to(x.dtype)
    return torch.ops.aten.native_layer_norm_backward(x, x, [ROW], mean, mean, None, None, [True, False, False])


def group_norm_gradient(x: Tensor) -> object:
    """The gradient of group norm's input."""
    means, area = x.new_zeros((1, 32)), x.numel() // 32
    grad = x.view(1, 32, area)
    return torch.ops.aten.native_group_norm_backward(
        grad, grad, means, means, None, 1, 32, area, 32, [True] + [False] * 2
    )


def unpacked_int8(x: Tensor) -> Call:
    """Dequantise an int8 weight as the frozen int8 layers do."""
    q, scale = torch.ones_like(x, dtype=torch.int8), torch.ones(len(x), device=x.device)
    return lambda: dequantise_weight(q, scale, x.dtype)


def unpacked_nf4(x: Tensor) -> Call:
    """Dequantise an nf4 weight."""
    import bitsandbytes  # noqa: F401 registers the kernels

    packed = torch.zeros((x.numel() // 2, 1), dtype=torch.uint8, device=x.device)
    scales = torch.ones(x.numel() // BLOCK, device=x.device)
    unpack = torch.ops.bitsandbytes.dequantize_4bit.default
    return lambda: unpack(packed, scales, BLOCK, "nf4", tuple(x.shape), x.dtype)


def updated_in_8_bits(x: Tensor) -> Call:
    """An update by bitsandbytes' Adam with 8-bit state."""
    from bitsandbytes.functional import create_dynamic_map

    states = [torch.zeros(x.numel(), dtype=torch.uint8, device=x.device) for _ in range(2)]
    maps = [create_dynamic_map(signed).to(x.device) for signed in (True, False)]
    scales = [torch.ones(-(-x.numel() // 256), device=x.device) for _ in range(2)]
    update, numbers = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default, (0.9, 0.999, 0.0, 0.0, 1e-8)
    return lambda: update("adam", x, x, *states, *numbers, 1, 1e-4, *maps, *scales, 0.0, 1.0, False)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fill a tensor with random values: a power-limited card multiplies zeros faster."""
    count = math.prod(shape)
    pool = _pool(device, dtype)
    values = pool.repeat(-(-count // len(pool)))[:count] if count > len(pool) else pool[:count].clone()
    return values.view(shape)


def forget_values() -> None:
    """Free the values that ``drawn`` repeats."""
    _pool.cache_clear()


@cache
def _pool(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(2**24, device=device).mul_(0.1).to(dtype)
