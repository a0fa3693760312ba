"""Feed-forward networks whose layers multiply in int8: GELU's output exists only as int8 rows.

A network x -> down(GELU(up(x))) writes up's output h, and reads it to quantise GELU(h) for down in the same launch.
Without gradients for the layers nothing else needs GELU(h), which is four times as wide as x. With int8 gradients, the
gradient of h exists only as int8 rows, too.

Autograd sees a placeholder of GELU(h), a single element expanded to its shape, which nothing reads.

Shapes: m rows (samples x tokens), i inputs, f features of h, o outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from simpletune.quant import int8_gelu, int8_products, int8_rotated
from simpletune.quant.int8_gelu import int8_gelu_gradient_rows, int8_gelu_rows
from simpletune.quant.int8_linear import Int8Linear
from simpletune.quant.int8_multiply import Context, Int8Product, shared_rows
from simpletune.quant.int8_products import input_gradient, int8_product
from simpletune.quant.rotation import rotated


def fuse_feed_forwards(modules: Iterable[nn.Module]) -> None:
    """Let the feed-forward networks within modules quantise GELU's output in one launch, where they can.

    Each pass finds out whether they can: layers may get an update, and devices differ. Where they cannot, the
    network's own forward pass runs.

    Args:
        modules: changed in place.
    """
    from diffusers.models.attention import FeedForward

    for module in modules:
        for network in module.modules():
            if isinstance(network, FeedForward):
                network.forward = _fused(network, network.forward)


def _fused(network: nn.Module, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward pass of a network."""

    @functools.wraps(plain)
    def forward(x: Tensor) -> Tensor:  # [..., i] -> [..., o]
        down = _down_of(network)
        if down is None or torch.compiler.is_compiling() or not _serves(down, x):
            return plain(x)
        assert isinstance(network.net, nn.ModuleList)
        up = network.net[0].proj
        if isinstance(up, Int8Linear) and _is_plain(up) and _serves(up, x):
            rows = shared_rows(x, up.block)
            a, h = _Up.apply(x, *rows, up.weight, up.scale, up.bias, up.int8_gradient, up.block)
        else:
            h = up(x)
            a = _Gelu.apply(h)
        with torch.no_grad():
            rows = int8_gelu_rows(h, down.block)
        return Int8Product.apply(a, *rows, down.weight, down.scale, down.bias, down.int8_gradient, down.block)

    return forward


def _down_of(network: nn.Module) -> Int8Linear | None:
    """A network's second layer, if the network is of a kind that can be fused now."""
    net = network.net
    assert isinstance(net, nn.ModuleList)
    if len(net) != 3 or getattr(net[0], "approximate", "none") != "tanh":
        return None
    dropout, down = net[1], net[2]
    if dropout.p and network.training or not isinstance(down, Int8Linear) or not _is_plain(down):
        return None
    return down


def _is_plain(layer: Int8Linear) -> bool:
    """Whether a layer multiplies in int8, and nothing watches its calls."""
    return layer.int8_products and not (layer._forward_hooks or layer._forward_pre_hooks)


def _serves(layer: Int8Linear, x: Tensor) -> bool:
    """Whether a layer multiplies as many rows as x has in int8, on x's device."""
    device = x.device
    return (
        int8_products.serves(x)
        and int8_gelu.why_not(device) is None
        and (not layer.block or int8_rotated.why_not(device) is None)
    )


def _placeholder(h: Tensor) -> Tensor:
    """A tensor of h's shape that takes no memory."""
    return h.new_empty(()).expand(h.shape)


def _gradient_in_place(grad: Tensor, h: Tensor) -> Tensor:
    """The gradient of h in the memory of GELU(h)'s gradient, which the second layer made and nothing else has."""
    result: Tensor = torch.ops.aten.gelu_backward.grad_input(grad, h, approximate="tanh", grad_input=grad)
    return result


class _Gelu(torch.autograd.Function):
    """A placeholder of GELU(h), whose gradient is that of GELU."""

    @staticmethod
    def forward(ctx: Context, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return _placeholder(h)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return _gradient_in_place(grads[0], h)


class _Up(torch.autograd.Function):
    """h = up(x) by quantised rows, and a placeholder of GELU(h), through which the gradient of x comes."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        x_q: Tensor,
        x_scale: Tensor,
        q: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        int8: bool,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        h = int8_product(x_q, x_scale, q, scale, bias, x.dtype).view(*x.shape[:-1], len(q))
        ctx.save_for_backward(h, q, scale)
        ctx.int8, ctx.block = int8, block
        ctx.mark_non_differentiable(h)
        ctx.set_materialize_grads(False)
        return _placeholder(h), h

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None, None]:
        h, q, scale = ctx.saved_tensors
        if ctx.int8:
            rows, row_scale = int8_gelu_gradient_rows(grads[0], h, scale)
            grad_x = int8_product(rows, row_scale, q.t(), None, None, h.dtype).view(*h.shape[:-1], q.shape[1])
            grad_x = rotated(grad_x, ctx.block)
        else:
            grad_x = input_gradient(_gradient_in_place(grads[0], h), q, scale, ctx.block)
        return grad_x, None, None, None, None, None, None, None
