"""The frozen nf4 linear layer: plain tensors with bitsandbytes' kernels for the 4-bit arithmetic.

Shapes: n rows (samples x tokens), i input and o output features, k = ceil(o i / 64) blocks, g = ceil(k / 256) groups of
blocks.

bitsandbytes' own ``Linear4bit`` hides its weight from autograd, so an offloaded block's buffer may be overwritten
before the backward pass has read it (bitsandbytes #2034). Here the tensors belong to the module, so they move, offload
and save like any others.
"""

from __future__ import annotations

import bitsandbytes  # noqa: F401 registers the kernels
import torch
from torch import Tensor, nn

from simpletune.engine.quant.frozen_product import Packed, frozen_product
from simpletune.engine.quant.rotation import (
    Rotate,
    Rotation,
    rotate_rows,
    rotate_weight,
    rotates_weight,
    rotation_block,
)

BLOCK, GROUP = 64, 256


def quantise_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:  # fp32 [k] -> uint8 [g, 256], fp32 [g, 2]
    """Quantise scales to 8 bits: 256 even steps from the smallest to the largest of each group; |error| <= step / 2.

    bitsandbytes uses a table of uneven steps around one mean. The scales of blocks are close to each other, so even
    steps over each group's range are as accurate, and need no table on every device. Returns the quantised scales, with
    the last group padded, and each group's smallest scale and step.
    """
    if absmax.is_meta:  # computing shapes operation by operation takes milliseconds a layer
        groups = -(-len(absmax) // GROUP)
        return absmax.new_empty(groups, GROUP, dtype=torch.uint8), absmax.new_empty(groups, 2)
    filled = torch.cat([absmax, absmax[-1:].expand(-len(absmax) % GROUP)]).view(-1, GROUP)
    low, high = filled.amin(dim=1), filled.amax(dim=1)
    step = (high - low) / (GROUP - 1)
    step = torch.where(step > 0, step, torch.ones_like(step))
    q = ((filled - low[:, None]) / step[:, None]).round_().clamp_(0, GROUP - 1).to(torch.uint8)
    return q, torch.stack([low, step], dim=1)


def _dequantise(
    packed: Tensor,  # uint8 [ceil(o i / 2), 1]
    absmax: Tensor,  # fp32 [k], or uint8 [g, 256]
    steps: Tensor | None,  # fp32 [g, 2] where absmax is uint8
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:  # [o, i]
    if steps is not None:
        absmax = _scales(absmax, steps, shape)
    return torch.ops.bitsandbytes.dequantize_4bit.default(packed, absmax, BLOCK, "nf4", shape, dtype)


def _scales(absmax: Tensor, steps: Tensor, shape: tuple[int, int]) -> Tensor:  # fp32 [k]
    """Dequantise the scales of a weight's blocks."""
    blocks = -(-shape[0] * shape[1] // BLOCK)
    return (absmax * steps[:, 1:]).add_(steps[:, :1]).view(-1)[:blocks]


def _unpack(
    dtype: torch.dtype, shape: tuple[int, int], block: int, packed: Tensor, absmax: Tensor, *steps: Tensor
) -> Tensor:  # [o, i]
    return rotate_rows(_dequantise(packed, absmax, steps[0] if steps else None, shape, dtype), block)


class Nf4Linear(nn.Linear):
    """A frozen ``nn.Linear`` with packed nf4 weight, one scale per block, and an optional bias [o].

    PEFT wraps it like any linear layer; the logical shape of the weight is (``out_features``, ``in_features``). Do not
    cast its scales: move it with ``to(device)``, never with ``to(dtype)``.
    """

    absmax: Tensor
    steps: Tensor | None
    block = 0
    """Size of the blocks of the rotation that the weight is stored in (rotation.py); 0: none."""
    rotates_weight = True
    """Whether many rows may be multiplied by the weight rotated back, instead of being rotated."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype, double: bool, rotation: Rotation = "none") -> Nf4Linear:
        """Quantise a linear layer with weights in any floating type, on its device.

        Args:
            dtype: the type of the bias.
            double: whether to quantise the scales too.
        """
        twin = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        twin.block = rotation_block(rotation, linear)
        weight = rotate_weight(linear.weight.detach(), twin.block).float().contiguous()
        # each weight becomes one of 16 quantiles times its block's largest magnitude (arXiv:2305.14314, eq. 4)
        packed, absmax = torch.ops.bitsandbytes.quantize_4bit.default(weight, BLOCK, "nf4", torch.uint8)
        steps = None
        if double:
            absmax, steps = quantise_scales(absmax)
        twin.weight = nn.Parameter(packed, requires_grad=False)
        twin.register_buffer("absmax", absmax)
        twin.register_buffer("steps", steps)
        if linear.bias is not None:
            twin.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
        return twin

    def forward(self, x: Tensor) -> Tensor:  # [..., i] -> [..., o]
        """Multiply with the dequantised weight in the input's type."""
        block = self.block
        if block and not (self.rotates_weight and rotates_weight(x, self.out_features)):
            x, block = Rotate.apply(x, block), 0
        return frozen_product(x, self._packed(block), self.bias)

    def packed_weight(self) -> Packed | None:
        """Return the weight, for a product in somebody else's pass; None if it is rotated."""
        return None if self.block else self._packed(0)

    def _packed(self, block: int) -> Packed:
        packed = self.weight, self.absmax, *([] if self.steps is None else [self.steps])
        return _unpack, ((self.out_features, self.in_features), block), packed

    def dequantise(self) -> Tensor:  # fp32 [o, i]
        """Return the dequantised weight, without its rotation."""
        shape = self.out_features, self.in_features
        weight = _dequantise(self.weight, self.absmax, self.steps, shape, torch.float32)
        return rotate_weight(weight, self.block)

    def row_block(self, first: int, last: int) -> Tensor:  # fp32 [last - first, i]
        """Return some rows of ``dequantise``; dequantises all of them if they share a scale with their neighbours."""
        width = self.in_features
        if width % BLOCK:
            return self.dequantise()[first:last]
        whole = self.out_features, width
        absmax = self.absmax if self.steps is None else _scales(self.absmax, self.steps, whole)
        packed, absmax = self.weight[first * width // 2 : last * width // 2], absmax[first * width // BLOCK :]
        shape = last - first, width
        weight = _dequantise(packed, absmax[: shape[0] * width // BLOCK], None, shape, torch.float32)
        return rotate_weight(weight, self.block)
