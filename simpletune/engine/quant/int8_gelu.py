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
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from simpletune.engine.kernels.fallback import Fallback
from simpletune.engine.quant import int8_products, int8_rotated
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.int8_multiply import Context, Int8Product, shared_rows
from simpletune.engine.quant.int8_products import input_gradient, int8_product
from simpletune.engine.quant.int8_rotated import int8_rotated_rows
from simpletune.engine.quant.rotation import rotate_rows
from simpletune.system.console import say

TOLERANCE = 1e-5
"""The relative difference allowed between a kernel's scales and torch's on fp32 rows with positive numbers. For
negative numbers, torch's GELU is accurate to 6e-8 of the number, the kernel's to 6e-8 of GELU."""

_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_LIBRARY.define("int8_gelu_rows(Tensor x, int block) -> (Tensor, Tensor)")
_LIBRARY.define("int8_gelu_gradient_rows(Tensor grad, Tensor x, Tensor columns) -> (Tensor, Tensor)")
for _name in ("int8_gelu_rows", "int8_gelu_gradient_rows"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # _Gelu and _Up define the gradients


def int8_gelu_rows(x: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise GELU(x) like ``int8_rows``.

    Args:
        x: [..., k].
        block: size of the blocks of a rotation of the rows (rotation.py), which divides k; 0: none.

    Returns:
        int8 [m, k] and fp32 [m].
    """
    return torch.ops.simpletune.int8_gelu_rows(x, block)


def int8_gelu_gradient_rows(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the gradient of GELU's input x, times columns, like ``int8_rows``.

    Args:
        grad: [..., k], the gradient of GELU(x).
        x: [..., k].
        columns: fp32 [k].

    Returns:
        int8 [m, k] and fp32 [m].
    """
    return torch.ops.simpletune.int8_gelu_gradient_rows(grad, x, columns)


@torch.library.register_fake("simpletune::int8_gelu_rows", lib=_LIBRARY)
def _(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return _empty_rows(x)


@torch.library.register_fake("simpletune::int8_gelu_gradient_rows", lib=_LIBRARY)
def _(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_rows(x)


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return x.new_empty((rows, x.shape[-1]), dtype=torch.int8), x.new_empty((rows,), dtype=torch.float32)


@torch.library.impl(_LIBRARY, "int8_gelu_rows", "CPU")
def _rows_by_torch(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return int8_rotated_rows(F.gelu(x, approximate="tanh"), block)


@torch.library.impl(_LIBRARY, "int8_gelu_gradient_rows", "CPU")
def _gradient_rows_by_torch(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    return int8_products.int8_rows(torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), columns)


FALLBACK = Fallback("kernel  GELU NO LONGER quantised in one launch on {device}, but in two: {reason}")


@torch.library.impl(_LIBRARY, "int8_gelu_rows", "CUDA")
def _rows_on_cuda(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    def kernel() -> tuple[Tensor, Tensor]:
        from simpletune.engine.quant import int8_rows_kernel

        return int8_rows_kernel.gelu_rows(x, None, None, block, int8_products.LEAST)

    return FALLBACK.run(x.device, kernel, lambda: _rows_by_torch(x, block))


@torch.library.impl(_LIBRARY, "int8_gelu_gradient_rows", "CUDA")
def _gradient_rows_on_cuda(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    def kernel() -> tuple[Tensor, Tensor]:
        from simpletune.engine.quant import int8_rows_kernel

        return int8_rows_kernel.gelu_rows(x, grad, columns, 0, int8_products.LEAST)

    return FALLBACK.run(x.device, kernel, lambda: _gradient_rows_by_torch(grad, x, columns))


@lru_cache(maxsize=8)
def why_not(device: torch.device) -> str | None:
    """Why a device that multiplies in int8 cannot quantise GELU in one launch, tried and logged once; None if it
    can."""
    with _disable_current_modes(), torch.no_grad():  # use real tensors, and hide them from the accounting
        reason = int8_products.try_kernel(_tried, device)
    if reason is not None:
        say(f"kernel  GELU NOT quantised in one launch on {device}, but in two: {reason}")
    return reason


def _tried(device: torch.device) -> str | None:
    """Compare rows of GELU and of its gradient with torch's on the CPU."""
    if device.type != "cuda":
        return None
    from simpletune.engine.quant import int8_rows_kernel  # not the operator, which would hide a failure

    x = torch.linspace(-6, 6, 768) * torch.arange(1, 6)[:, None] / 3
    grad, columns = x.flip(1).contiguous(), torch.linspace(0.5, 2, 768)
    found = [
        int8_rows_kernel.gelu_rows(x.to(device), None, None, 0, int8_products.LEAST),
        int8_rows_kernel.gelu_rows(x.to(device), None, None, 256, int8_products.LEAST),
        int8_rows_kernel.gelu_rows(x.to(device), grad.to(device), columns.to(device), 0, int8_products.LEAST),
    ]
    expected = [_rows_by_torch(x, 0), _rows_by_torch(x, 256), _gradient_rows_by_torch(grad, x, columns)]
    return None if all(map(_are_close, found, expected)) else "the kernel's rows differ from torch's"


def _are_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether rows differ by rounding at most."""
    (q, scale), (other, other_scale) = (part.cpu() for part in found), expected
    return bool((q.int() - other.int()).abs().max() <= 1) and torch.allclose(scale, other_scale, rtol=TOLERANCE)


def fuse_feed_forwards(modules: Iterable[nn.Module]) -> None:
    """Let the feed-forward networks within modules quantise GELU's output in one launch, where they can. Each pass
    checks whether they can: layers may get an update, and devices differ. Where they cannot, the network's own forward
    pass runs.

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
        up = network.net[0].get_submodule("proj")
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
    """A network's second layer, if the network can be fused now; otherwise None."""
    net = network.net
    assert isinstance(net, nn.ModuleList)
    if len(net) != 3 or getattr(net[0], "approximate", "none") != "tanh":
        return None
    dropout, down = net[1], net[2]
    if dropout.p and network.training or not isinstance(down, Int8Linear) or not _is_plain(down):
        return None
    return down


def _is_plain(layer: Int8Linear) -> bool:
    """Whether a layer multiplies in int8 and has no hooks."""
    return layer.int8_products and not (layer._forward_hooks or layer._forward_pre_hooks)


def _serves(layer: Int8Linear, x: Tensor) -> bool:
    """Whether a layer multiplies x in int8, given x's number of rows and device."""
    device = x.device
    return (
        int8_products.serves(x)
        and why_not(device) is None
        and (not layer.block or int8_rotated.why_not(device) is None)
    )


def _placeholder(h: Tensor) -> Tensor:
    """A tensor of h's shape that takes no memory."""
    return h.new_empty(()).expand(h.shape)


def _gradient_in_place(grad: Tensor, h: Tensor) -> Tensor:
    """The gradient of h, written over GELU(h)'s gradient, which the second layer made and nothing else holds."""
    result: Tensor = torch.ops.aten.gelu_backward.grad_input(grad, h, approximate="tanh", grad_input=grad)
    return result


class _Gelu(torch.autograd.Function):
    """A placeholder of GELU(h) with GELU's gradient."""

    @staticmethod
    def forward(ctx: Context, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return _placeholder(h)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return _gradient_in_place(grads[0], h)


class _Up(torch.autograd.Function):
    """h = up(x) from quantised rows, and a placeholder of GELU(h), through which the gradient of x flows."""

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
            grad_x = rotate_rows(grad_x, ctx.block)
        else:
            grad_x = input_gradient(_gradient_in_place(grads[0], h), q, scale, ctx.block)
        return grad_x, None, None, None, None, None, None, None
