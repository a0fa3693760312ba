"""GELU in bf16 by a table: there are 65,536 numbers, and looking one up is quicker on a CPU than its tanh.

The forward pass gives the bits of PyTorch's ``gelu(approximate="tanh")``; in the backward pass the derivative is
rounded to bf16 before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from torch import Tensor, nn

TANH = "tanh"
HALF = 2**15  # bf16 numbers read as int16 run from -HALF


@cache
def tables() -> tuple[Tensor, Tensor]:
    """GELU and its derivative [65536] of all bf16 numbers, in the order of their bits as int16."""
    numbers = torch.arange(-HALF, HALF, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ones = torch.ones_like(numbers, dtype=torch.float32)
    slopes = torch.ops.aten.gelu_backward(ones, numbers.float(), approximate=TANH)
    return F.gelu(numbers, approximate=TANH), slopes.bfloat16()


def _look_up(table: Tensor, x: Tensor) -> Tensor:
    places = x.contiguous().view(torch.int16).to(torch.int32).add_(HALF)
    return table.index_select(0, places.view(-1)).view(x.shape)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _look_up(tables()[0], x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return _look_up(tables()[1], x).mul_(grads[0])


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415, section 2), of any shape; by the table on the CPU in bf16."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return F.gelu(x, approximate=TANH)
    found: Tensor = _Gelu.apply(x)
    return found


def take_table(blocks: Iterable[nn.Module]) -> None:
    """Let the feed-forward layers of a transformer's blocks look their GELU up, in place."""
    for block in blocks:
        for module in block.modules():
            if isinstance(module, GELU) and module.approximate == TANH:
                module.gelu = gelu
