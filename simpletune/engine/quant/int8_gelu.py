"""Feed-forward networks whose layers multiply in int8: GELU's output exists only as int8 rows.

A network x -> down(GELU(up(x))) writes up's output h. One kernel on CUDA, or torch's operators elsewhere, quantises
GELU(h) for down; nothing else needs GELU(h), which is four times as wide as x, unless down has an update. With int8
gradients, the gradient of h exists only as int8 rows, too. Autograd sees a placeholder of GELU(h), a single element
expanded to its shape, which nothing reads.

Both quantisations are custom operators (``simpletune::int8_gelu_rows``, ``simpletune::int8_gelu_gradient_rows``),
so that fake tensors, memory accounting and predictions see what CUDA allocates and moves. GELU is the tanh
approximation. The CPU runs torch's GELU, then ``int8_rows``; the kernel's exponential may differ in the last bits.

Shapes: m rows (samples x tokens), i inputs, f features of h, o outputs, k the length of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simpletune.engine.kernels.fallback import Fallback
from simpletune.engine.quant import int8_products
from simpletune.engine.quant.int8_linear import Int8Linear, Int8Product, shared_rows
from simpletune.engine.quant.int8_products import (
    LEAST,
    empty_rows,
    input_gradient,
    int8_product,
    int8_rotated_rows,
    rows_kernels,
)
from simpletune.engine.quant.rotation import rotate_rows

TOLERANCE = 1e-5
"""The relative difference allowed between a kernel's scales and torch's on fp32 rows with positive numbers. For
negative numbers, torch's GELU is accurate to 6e-8 of the number, the kernel's to 6e-8 of GELU."""


def int8_gelu_rows(x: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise GELU(x) like ``int8_rotated_rows``."""
    return torch.ops.simpletune.int8_gelu_rows(x, block)


def int8_gelu_gradient_rows(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the gradient of GELU's input x, times columns, like ``int8_rows``; ``grad`` is that of GELU(x)."""
    return torch.ops.simpletune.int8_gelu_gradient_rows(grad, x, columns)


def _rows_by_torch(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return int8_rotated_rows(F.gelu(x, approximate="tanh"), block)


def _gradient_rows_by_torch(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    return int8_products.int8_rows(torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), columns)


FALLBACK = Fallback("kernel  GELU NO LONGER quantised in one launch on {device}, but in two: {reason}")


_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")  # _Gelu and _Up define the gradients
FALLBACK.define(
    _LIBRARY,
    "int8_gelu_rows(Tensor x, int block) -> (Tensor, Tensor)",
    _rows_by_torch,
    lambda x, block: rows_kernels().gelu_rows(x, None, None, block, LEAST),
)
FALLBACK.define(
    _LIBRARY,
    "int8_gelu_gradient_rows(Tensor grad, Tensor x, Tensor columns) -> (Tensor, Tensor)",
    _gradient_rows_by_torch,
    lambda grad, x, columns: rows_kernels().gelu_rows(x, grad, columns, 0, LEAST),
)
torch.library.register_fake("simpletune::int8_gelu_rows", empty_rows, lib=_LIBRARY)
torch.library.register_fake("simpletune::int8_gelu_gradient_rows", lambda grad, x, columns: empty_rows(x), lib=_LIBRARY)


def _try_rows(device: torch.device) -> str | None:
    """Compare rows of GELU and of its gradient with torch's on the CPU."""
    if device.type != "cuda":
        return None
    x = torch.linspace(-6, 6, 768) * torch.arange(1, 6)[:, None] / 3
    grad, columns = x.flip(1).contiguous(), torch.linspace(0.5, 2, 768)
    gelu_rows = rows_kernels().gelu_rows  # not the operator, which would hide a failure
    found = [
        gelu_rows(x.to(device), None, None, 0, LEAST),
        gelu_rows(x.to(device), None, None, 256, LEAST),
        gelu_rows(x.to(device), grad.to(device), columns.to(device), 0, LEAST),
    ]
    expected = [_rows_by_torch(x, 0), _rows_by_torch(x, 256), _gradient_rows_by_torch(grad, x, columns)]
    for (q, scale), (other, other_scale) in zip(found, expected, strict=True):  # may differ by rounding
        far = (q.cpu().int() - other.int()).abs().max() > 1
        if far or not torch.allclose(scale.cpu(), other_scale, rtol=TOLERANCE):
            return "the kernel's rows differ from torch's"
    return None


def fuse_feed_forwards(modules: Iterable[nn.Module]) -> None:
    """Let the feed-forward networks within modules quantise GELU's output in one launch, where they can. Each pass
    checks whether they can: layers may get an update, and devices differ. Where they cannot, the network's own forward
    pass runs."""
    from diffusers.models.attention import FeedForward

    for module in modules:
        for network in module.modules():
            if isinstance(network, FeedForward):
                network.forward = _fuse(network, network.forward)


def _fuse(network: nn.Module, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def forward(x: Tensor) -> Tensor:  # [..., i] -> [..., o]
        net = network.net
        assert isinstance(net, nn.ModuleList)
        if len(net) != 3 or getattr(net[0], "approximate", "none") != "tanh" or torch.compiler.is_compiling():
            return plain(x)
        up, dropout, down = net[0].get_submodule("proj"), net[1], net[2]
        if dropout.p and network.training or not _multiplies(down, x):
            return plain(x)
        if _multiplies(up, x):
            rows = shared_rows(x, up.block)
            a, h = _Up.apply(x, *rows, up.weight, up.scale, up.bias, up.int8_gradient, up.block)
        else:
            h = up(x)
            a = _Gelu.apply(h)
        with torch.no_grad():
            rows = int8_gelu_rows(h, down.block)
        return Int8Product.apply(a, *rows, down.weight, down.scale, down.bias, down.int8_gradient, down.block)

    return forward


def _multiplies(layer: nn.Module, x: Tensor) -> TypeGuard[Int8Linear]:
    """Return whether a layer multiplies x in int8, given x's number of rows and device, and has neither update nor
    hooks."""
    warning = "kernel  GELU NOT quantised in one launch on {device}, but in two: {reason}"
    return (
        isinstance(layer, Int8Linear)
        and layer.int8_products
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and int8_products.can_multiply(x)
        and int8_products.find_failure(_try_rows, x.device, warning) is None
        and (not layer.block or int8_products.rotation_problem(x.device) is None)
    )


def _placeholder(h: Tensor) -> Tensor:
    """Make a tensor of h's shape that takes no memory."""
    return h.new_empty(()).expand(h.shape)


def _gradient_in_place(grad: Tensor, h: Tensor) -> Tensor:
    """Compute the gradient of h, written over GELU(h)'s gradient, which the second layer made and nothing else
    holds."""
    result: Tensor = torch.ops.aten.gelu_backward.grad_input(grad, h, approximate="tanh", grad_input=grad)
    return result


class _Gelu(torch.autograd.Function):
    """A placeholder of GELU(h) with GELU's gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return _placeholder(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return _gradient_in_place(grads[0], h)


class _Up(torch.autograd.Function):
    """h = up(x) from quantised rows, and a placeholder of GELU(h), through which the gradient of x flows."""

    @staticmethod
    def forward(
        ctx: Any,
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None, None]:
        h, q, scale = ctx.saved_tensors
        if ctx.int8:
            rows, row_scale = int8_gelu_gradient_rows(grads[0], h, scale)
            grad_x = int8_product(rows, row_scale, q.t(), None, None, h.dtype).view(*h.shape[:-1], q.shape[1])
            grad_x = rotate_rows(grad_x, ctx.block)
        else:
            grad_x = input_gradient(_gradient_in_place(grads[0], h), q, scale, ctx.block)
        return grad_x, None, None, None, None, None, None, None
