"""Layer with a LoKr update: the Kronecker product of two small matrices (arXiv:2309.14859), which is never built.

With x as a matrix X [m, q], kron(W1, W2) x is W1 X W2^T (Van Loan, 2000). W2 may be a product of two factors: one is
applied before W1, the other after it. A whole W2 is applied before or after W1, whichever needs less memory. Saves only
the input for the backward pass, which neighbouring layers save, too.

On a convolution with a larger kernel, W2, or its right factor, is a convolution of the m groups of q channels, and W1
mixes its m results at every pixel.

Shapes: n rows (samples x tokens); o = l k outputs, i = m q inputs; W1 [l, m], W2 [k, q]; either may be a product of two
factors; p columns between W1 and its neighbours. Of a convolution: b samples, kernel kh x kw, c pixels of the output,
and s channels between W2's convolution and W1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simpletune.adapters.methods.formulas import full_factor, kronecker_delta
from simpletune.adapters.methods.layers import ADAPTER, FactorLayer, geometry_of
from simpletune.adapters.methods.lora_layers import Context, convolution_gradients
from simpletune.engine.quant.int8_conv import Geometry


class LokrLayer(FactorLayer):
    """Add kron(W1, W2) x, or some of its rows, to a frozen layer's output.

    Args:
        base_layer: the frozen layer.
        factors: ``lokr_w1`` [l, m] or ``lokr_w1_a`` [l, r] and ``lokr_w1_b`` [r, m]; likewise ``lokr_w2`` [k, q]. With
            a larger kernel, ``lokr_w2`` is [k, q, kh, kw] and ``lokr_w2_b`` [r, q kh kw].
        adapter: name by which ``scaling`` holds the strength.
        skipped: number of the product's first rows that belong to other layers.
    """

    cast_first = ("lokr_w2", "lokr_w2_a", "lokr_w2_b")  # W1's gradient is summed in fp32

    def __init__(self, base_layer: nn.Module, factors: Mapping[str, Tensor], adapter: str = ADAPTER, skipped: int = 0):
        super().__init__(base_layer, factors, adapter)
        self.skipped = skipped

    @staticmethod
    def initial_factors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        found = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for name, factor in found.items():
            if name not in ("lokr_w2", "lokr_w2_b"):  # zero, with a gradient from the start
                nn.init.kaiming_uniform_(factor, a=math.sqrt(5))
        return found

    def _first(self) -> Tensor:  # [l, m]
        """Return W1 times the strength."""
        w1 = full_factor(self.factors, "lokr_w1")
        return w1 if self.strength == 1 else w1 * self.strength

    def add_convolution(self, y: Tensor, x: Tensor) -> Tensor:
        assert self.shape is not None
        factors = self.factors
        before, after = factors.get("lokr_w2"), None
        if before is None:
            before, after = factors["lokr_w2_b"], factors["lokr_w2_a"]
            before = before.view(len(before), -1, *self.shape[2:])
        return add_kronecker_convolution(y, x, self._first(), before, after, geometry_of(self))

    def add_linear(self, y: Tensor, x: Tensor) -> Tensor:
        factors, w1 = self.factors, self._first()
        if "lokr_w2" in factors:
            before, after = sides(w1, full_factor(factors, "lokr_w2"))
            height = len(w1) * len(factors["lokr_w2"])
        else:
            before, after = factors["lokr_w2_b"], factors["lokr_w2_a"]
            height = len(w1) * len(after)
        if height == y.shape[-1]:
            return add_kronecker(y, x, w1, before, after)
        rows = add_kronecker(y.new_zeros(*y.shape[:-1], height), x, w1, before, after)
        return y + rows[..., self.skipped : self.skipped + y.shape[-1]]

    def merge(self, weight: Tensor) -> Tensor:
        delta = kronecker_delta(self.factors)[self.skipped : self.skipped + len(weight)]
        return weight + self.strength * delta.view_as(weight)


class _Added(torch.autograd.Function):
    """Compute y += W1 (X before^T) after^T in the type of y and return y. The op that made y must not need y."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, x: Tensor, w1: Tensor, before: Tensor | None, after: Tensor | None) -> Tensor:
        x, w1 = x.to(y.dtype), w1.to(y.dtype)
        before, after = (None if factor is None else factor.to(y.dtype) for factor in (before, after))
        inner = _inner(x, w1, before)
        left = w1.expand(len(inner), *w1.shape)
        rows = y.detach().view(len(inner), len(w1), -1)  # [n, l, k]
        if after is None:
            rows.baddbmm_(left, inner)
        else:
            rows.view(-1, len(after)).addmm_(torch.bmm(left, inner).view(-1, after.shape[1]), after.t())
        ctx.save_for_backward(x, w1, before, after)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        x, w1, before, after = ctx.saved_tensors
        _, wants_x, _, wants_before, wants_after = ctx.needs_input_grad
        inner = _inner(x, w1, before)  # [n, m, p]
        left = w1.expand(len(inner), *w1.shape)
        grad = grad_y.contiguous().view(len(inner), len(w1), -1)  # [n, l, k]
        grad_after = None
        if after is not None:
            if wants_after:
                grad_after = grad.view(-1, len(after)).t() @ torch.bmm(left, inner).view(-1, after.shape[1])
            grad = (grad.view(-1, len(after)) @ after).view(len(inner), len(w1), -1)  # [n, l, p]
        grad_w1 = torch.bmm(grad, inner.transpose(1, 2)).sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
        if not (wants_x or wants_before):
            return grad_y, None, grad_w1, None, grad_after
        grad = torch.bmm(left.transpose(1, 2), grad).view(-1, grad.shape[2])  # [n m, p]
        if before is None:
            return grad_y, grad.view(x.shape), grad_w1, None, grad_after
        grad_before = grad.t() @ x.reshape(len(grad), -1) if wants_before else None
        return grad_y, (grad @ before).view(x.shape) if wants_x else None, grad_w1, grad_before, grad_after


def _inner(x: Tensor, w1: Tensor, before: Tensor | None) -> Tensor:  # [n, m, p]
    """Return X before^T, or X itself."""
    rows = x.numel() // x.shape[-1]
    if before is None:
        return x.reshape(rows, w1.shape[1], -1)
    return (x.reshape(-1, before.shape[1]) @ before.t()).view(rows, w1.shape[1], -1)


def add_kronecker(
    y: Tensor,  # [..., o]
    x: Tensor,  # [..., i]
    w1: Tensor,  # [l, m]
    before: Tensor | None,  # [p, q]
    after: Tensor | None,  # [k, p]
) -> Tensor:  # [..., o]
    """Add kron(w1, after before) x to a layer's output, in the type of y (LoKr: arXiv:2309.14859, eq. 5).

    ``before`` and ``after`` are the right and left factor of W2; None: the identity. Overwrites y, so nothing else may
    need it, and returns it. Computes a new tensor instead under ``torch.compile``, and if y is not contiguous.
    """
    if torch.compiler.is_compiling() or not y.is_contiguous():
        inner = x.to(y.dtype).unflatten(-1, (w1.shape[1], -1))
        inner = inner if before is None else inner @ before.to(y.dtype).t()
        inner = w1.to(y.dtype) @ inner
        return y + (inner if after is None else inner @ after.to(y.dtype).t()).flatten(-2)
    added: Tensor = _Added.apply(y, x, w1, before, after)
    return added


class _AddedConvolution(torch.autograd.Function):
    """``_Added`` for a convolution, with channels first."""

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, x: Tensor, w1: Tensor, before: Tensor, after: Tensor | None, geometry: Geometry
    ) -> Tensor:
        x, w1, before = (tensor.to(y.dtype) for tensor in (x, w1, before))
        after = None if after is None else after.to(y.dtype)
        inner = _convolved(x, w1, before, geometry)  # [b, m, s c]
        left = w1.expand(len(x), *w1.shape)
        if after is None:
            y.detach().view(len(x), len(w1), -1).baddbmm_(left, inner)
        else:
            mixed = torch.bmm(left, inner).view(len(x) * len(w1), after.shape[1], -1)  # [b l, s, c]
            y.detach().view(len(mixed), len(after), -1).baddbmm_(after.expand(len(mixed), *after.shape), mixed)
        ctx.save_for_backward(x, w1, before, after)
        ctx.geometry = geometry
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [b, o, h', w']
        x, w1, before, after = ctx.saved_tensors
        _, wants_x, _, wants_before, wants_after, _ = ctx.needs_input_grad
        inner = _convolved(x, w1, before, ctx.geometry)  # [b, m, s c]
        left = w1.expand(len(x), *w1.shape)
        grad = grad_y.contiguous()
        grad_after = None
        if after is not None:
            grad = grad.view(len(x) * len(w1), len(after), -1)  # [b l, k, c]
            if wants_after:
                mixed = torch.bmm(left, inner).view(len(grad), after.shape[1], -1)
                grad_after = torch.bmm(grad, mixed.transpose(1, 2)).sum(0)
            grad = after.t() @ grad  # [b l, s, c]
        grad = grad.view(len(x), len(w1), -1)  # [b, l, s c]
        grad_w1 = torch.bmm(grad, inner.transpose(1, 2)).sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
        grad_x = grad_before = None
        if wants_x or wants_before:
            groups = _groups(x, w1)
            grad = torch.bmm(left.transpose(1, 2), grad).view(len(groups), len(before), *grad_y.shape[2:])
            grad_x, grad_before = convolution_gradients(grad, groups, before, ctx.geometry, (wants_x, wants_before))
            grad_x = None if grad_x is None else grad_x.view(x.shape)
        return grad_y, grad_x, grad_w1, grad_before, grad_after, None


def _groups(x: Tensor, w1: Tensor) -> Tensor:  # [b, m q, h, w] -> [b m, q, h, w]
    return x.reshape(len(x) * w1.shape[1], -1, *x.shape[2:])


def _convolved(x: Tensor, w1: Tensor, before: Tensor, geometry: Geometry) -> Tensor:  # [b, m, s c]
    """Convolve each group of x's channels."""
    return F.conv2d(_groups(x, w1), before, None, *geometry).view(len(x), w1.shape[1], -1)


def add_kronecker_convolution(
    y: Tensor,  # [b, o, h', w']
    x: Tensor,  # [b, i, h, w]
    w1: Tensor,  # [l, m]
    before: Tensor,  # [s, q, kh, kw]
    after: Tensor | None,  # [k, s]
    geometry: Geometry,
) -> Tensor:  # [b, o, h', w']
    """Do ``add_kronecker`` on the output of a convolution with this geometry; ``before`` has its kernel."""
    if torch.compiler.is_compiling() or not y.is_contiguous():
        x, w1, before = (tensor.to(y.dtype) for tensor in (x, w1, before))
        inner = w1 @ F.conv2d(_groups(x, w1), before, None, *geometry).reshape(len(x), w1.shape[1], -1)
        if after is not None:
            inner = after.to(y.dtype) @ inner.view(len(x), len(w1), len(before), -1)
        return y + inner.reshape(y.shape)
    added: Tensor = _AddedConvolution.apply(y, x, w1, before, after, geometry)
    return added


def sides(w1: Tensor, w2: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return a whole W2 as ``before`` or ``after``, whichever makes the tensor between the products smaller."""
    return (w2, None) if w1.shape[1] * w2.shape[0] <= w1.shape[0] * w2.shape[1] else (None, w2)
