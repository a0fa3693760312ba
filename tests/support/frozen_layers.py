"""Frozen layers of every precision, and what is compared of them."""

from __future__ import annotations

from typing import Any

import torch
from blocks import PRECISIONS
from torch import Tensor, nn

from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import Nf4Linear
from simpletune.engine.tensors import row_blocks

OUT, IN, RANK, SCALE = 40, 64, 3, 0.7


def frozen(kind: str, bias: bool = True) -> nn.Module:
    """A frozen layer of a kind, always the same."""
    torch.manual_seed(0)
    layer: Any = nn.Conv2d(IN, OUT, 1, bias=bias) if kind == "conv" else nn.Linear(IN, OUT, bias=bias)
    if bias:
        nn.init.normal_(layer.bias)
    if kind == "int8":
        layer = Int8Linear.from_linear(layer, torch.float32)
    if kind.startswith("nf4"):
        layer = Nf4Linear.from_linear(layer, torch.float32, double=kind == "nf4-double")
    if kind == "quanto":
        layer = PRECISIONS["int8-quanto"].convert(layer)
    return layer.requires_grad_(False)


def weight_of(layer: nn.Module) -> Tensor:
    """The frozen weight [o, i] in float64."""
    return torch.cat(list(row_blocks(layer, OUT, rows=7 if not isinstance(layer, Nf4Linear) else 8))).double()


def weighted(y: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    return (y * weights.to(y.dtype)).sum()


# arXiv:2305.14314, appendix E
QUANTILES = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
