"""Rotate the inputs of frozen layers by a block Hadamard matrix, so that no weight or activation is an outlier.

x W^T = (x H)(W H)^T for an orthogonal H. Where a few columns are large, rounding W H and x H loses less than rounding W
and x: H spreads each column over its whole block. H is block diagonal with the Kronecker powers of the regular matrix
R4 = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]] / 2 (ConvRot, arXiv:2512.03673). All rows of a regular
matrix have the same sum, so it does not gather a constant row in one column, as Sylvester's would. H is symmetric and
its own inverse, and its entries are powers of two, exact in every type.

Shapes: n rows (samples x tokens), i input and o output features, B the size of a block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

Rotation = Literal["none", "hadamard"]
SIZES = (256, 64, 16)
"""Sizes of blocks, powers of 4; the largest that divides a layer's inputs is used."""
ROWS = 1024  # of a weight that are rotated at once

_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_LIBRARY.define("rotated(Tensor x, int block) -> Tensor")
_LIBRARY.impl("rotated", torch.library.fallthrough_kernel, "Autograd")  # Rotate defines the gradient


def rotation_block(rotation: Rotation, layer: nn.Linear) -> int:
    """Return the size of the blocks in which a layer's inputs are rotated; 0: they are not, or no size divides them."""
    return next((size for size in SIZES if rotation != "none" and layer.in_features % size == 0), 0)


def hadamard(x: Tensor, block: int) -> Tensor:  # fp32 [..., i] -> [..., i]
    """Multiply x by H in fp32 with the kernel's order of additions (int8_rows_kernel.py), on any device.

    Each pass multiplies one base-4 digit of the index by R4 (half the sum of four, minus the opposite one) and moves it
    to the front; after all passes, the digits are in order again. The block, a power of 4, divides x's last dimension.
    """
    values, count = x.reshape(-1, block), 1
    while count < block:
        a, b, c, d = values.view(-1, block // 4, 4).unbind(-1)
        half = ((a + b) + (c + d)) * 0.5
        values = torch.stack((half - d, half - c, half - b, half - a), dim=1)
        count *= 4
    return values.view(x.shape)


def rotate_weight(weight: Tensor, block: int) -> Tensor:  # [o, i] -> fp32 [o, i], or itself if the block is 0
    """Rotate a weight, or rotate it back, in fp32, some rows at a time to keep the temporaries small."""
    if not block:
        return weight
    if weight.is_meta:
        return torch.empty_like(weight, dtype=torch.float32)
    return torch.cat([hadamard(rows.float(), block) for rows in weight.split(ROWS)])


@lru_cache(maxsize=16)
def _matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # [B, B]
    """Build one block of H on the device."""
    return hadamard(torch.eye(block, device=device), block).to(dtype)


torch.library.register_fake("simpletune::rotated", lambda x, block: x.new_empty(x.shape), lib=_LIBRARY)


@torch.library.impl(_LIBRARY, "rotated", "CompositeExplicitAutograd")
def _rotate(x: Tensor, block: int) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor in the cache could not be used in training
        matrix = _matrix(block, x.dtype, x.device)
    return (x.view(-1, block) @ matrix).view(x.shape)


def rotate_rows(x: Tensor, block: int) -> Tensor:  # [..., i] -> [..., i]
    """Compute x H in x's type, rounded once; return x itself for block 0. Has no gradient."""
    # exact products, summed in fp32
    return torch.ops.simpletune.rotated(x.contiguous(), block) if block else x


class Rotate(torch.autograd.Function):
    """``rotate_rows`` with a gradient: the output's times H^T = H. Saves no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int) -> Tensor:
        ctx.block = block
        return rotate_rows(x, block)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return rotate_rows(grads[0], ctx.block), None


def rotates_weight(x: Tensor, outputs: int) -> bool:
    """Return whether undoing the rotation of a dequantised weight [outputs, i] costs less than rotating x [..., i]."""
    return x.numel() > outputs * x.shape[-1]
