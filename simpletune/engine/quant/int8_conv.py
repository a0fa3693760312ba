"""The frozen int8 convolution: dequantises its weight for each pass, one layer at a time.

Shapes: b samples, i input and o output channels, h x w pixels, kh x kw the kernel.

torch's convolution saves its input for the backward pass even if its weight is frozen. This one saves only references
to the int8 weight and the scale.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from simpletune.engine.quant.int8_linear import quantise_rows
from simpletune.engine.quant.int8_products import dequantise_weight

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair, int]
"""Stride, padding and dilation of both dimensions, and the number of groups."""


class _FrozenInt8Convolution(torch.autograd.Function):
    """y = x * (q scale) + bias; saves only references to q and scale for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(q, scale)
        ctx.size, ctx.geometry = x.shape, geometry
        bias = None if bias is None else bias.to(x.dtype)
        return F.conv2d(x, dequantise_weight(q, scale, x.dtype), bias, *geometry)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # [b, o, h', w']
        q, scale = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        weight = dequantise_weight(q, scale, grad_y.dtype)
        return conv2d_input(ctx.size, weight, grad_y, *ctx.geometry), None, None, None, None


class Int8Conv2d(nn.Conv2d):
    """A frozen ``nn.Conv2d`` with int8 weight [o, i / groups, kh, kw], fp32 ``scale`` [o] and an optional bias [o].

    PEFT wraps it like any convolution and builds the factors by calling the layer's class (peft/tuners/lora/layer.py,
    ``_ConvNd.update_layer``). So an instance that ``from_conv`` has not made is a plain convolution. ``to(dtype)`` does
    not cast the int8 weight.
    """

    scale: Tensor

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, dtype: torch.dtype) -> Int8Conv2d:
        """Quantise a convolution, with weights in any floating type, on its device; the bias gets the type ``dtype``.
        Raises ValueError if its padding is not numeric zero padding."""
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(
                f"padding {conv.padding} of {conv.padding_mode} cannot be quantised: it must be a number of zeros"
            )
        kernel, stride, padding, dilation = (
            cast(Pair, each) for each in (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
        )
        channels = conv.in_channels, conv.out_channels
        twin = cls(*channels, kernel, stride, padding, dilation, conv.groups, bias=False, device="meta")
        q, scale = quantise_rows(conv.weight.detach().flatten(1))
        twin.weight = nn.Parameter(q.view_as(conv.weight), requires_grad=False)
        twin.register_buffer("scale", scale)
        if conv.bias is not None:
            twin.bias = nn.Parameter(conv.bias.detach().to(dtype), requires_grad=False)
        return twin

    def forward(self, x: Tensor) -> Tensor:  # [b, i, h, w] -> [b, o, h', w']
        """Convolve with the dequantised weight in the input's type."""
        if self.weight.is_floating_point():  # a LoRA's factor
            return super().forward(x)
        geometry = self.stride, self.padding, self.dilation, self.groups
        return _FrozenInt8Convolution.apply(x, self.weight, self.scale, self.bias, geometry)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [o, i / groups, kh, kw]
        """Return the dequantised weight."""
        return dequantise_weight(self.weight, self.scale, dtype)

    def row_block(self, first: int, last: int) -> Tensor:  # fp32 [last - first, i kh kw]
        """Return some rows of the dequantised weight."""
        return dequantise_weight(self.weight[first:last], self.scale[first:last], torch.float32).flatten(1)
