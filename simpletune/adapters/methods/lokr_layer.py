"""Layer with a LoKr update: the Kronecker product of two small matrices (arXiv:2309.14859), which is never built.

With x as a matrix X [m, q], kron(W1, W2) x is W1 X W2^T (Van Loan, 2000). W2 may be a product of two factors: one is
applied before W1, the other after it. A whole W2 is applied before or after W1, whichever needs less memory. Saves only
the input for the backward pass, which neighbouring layers save, too.

Shapes: n rows (samples x tokens); o = l k outputs, i = m q inputs; W1 [l, m], W2 [k, q]; either may be a product of two
factors; p columns between W1 and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from simpletune.adapters.methods.formulas import full_factor, kronecker_delta
from simpletune.adapters.methods.layers import ADAPTER, FactorLayer
from simpletune.adapters.methods.lora_layers import Context


class LokrLayer(FactorLayer):
    """Add kron(W1, W2) x, or some of its rows, to a frozen layer's output.

    Args:
        base_layer: the frozen layer.
        factors: ``lokr_w1`` [l, m] or ``lokr_w1_a`` [l, r] and ``lokr_w1_b`` [r, m]; likewise ``lokr_w2`` [k, q].
        adapter: name by which ``scaling`` holds the strength.
        skipped: number of the product's first rows that belong to other layers.
    """

    def __init__(self, base_layer: nn.Module, factors: Mapping[str, Tensor], adapter: str = ADAPTER, skipped: int = 0):
        super().__init__(base_layer, factors, adapter)
        self.skipped = skipped

    @staticmethod
    def initial_factors(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        found = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for name, factor in found.items():
            if name not in ("lokr_w2", "lokr_w2_b"):  # zero, with a gradient from the start
                nn.init.kaiming_uniform_(factor, a=math.sqrt(5))
        return found

    def updated(self, y: Tensor, x: Tensor) -> Tensor:
        factors = self.factors
        w1 = full_factor(factors, "lokr_w1")
        w1 = w1 if self.strength == 1 else w1 * self.strength
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

    def merged(self, weight: Tensor) -> Tensor:
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
    """X before^T, or X itself."""
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


def sides(w1: Tensor, w2: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A whole W2 as ``before`` or ``after``, whichever makes the tensor between the products smaller."""
    return (w2, None) if w1.shape[1] * w2.shape[0] <= w1.shape[0] * w2.shape[1] else (None, w2)
