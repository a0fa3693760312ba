"""Adaptive norms and gated sums of a transformer block, each as one operator.

out = norm(x) (1 + scale) + shift and x + gate y (adaLN-Zero, arXiv:2212.09748, section 3.2). The gated sum and the norm
that follows it are one operator, and so are the gradients that meet before it: torch's operators would write every
intermediate result and read it again. adaln_operators.py has the operators, this module their gradients.

Shapes: b samples, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from simpletune.engine.kernels.adaln_operators import plain_sum
from simpletune.engine.kernels.sizes import LONGEST

TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Context(Protocol):
    """An autograd function's context."""

    needs_input_grad: Sequence[bool]
    saved_tensors: Sequence[Tensor]
    eps: float
    trains: bool

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether missing gradients are zeros."""


class ScaleShift(NamedTuple):
    """Scale (factor minus one) and shift of normalised tokens.

    Args:
        scale: [b, d].
        shift: [b, d].
    """

    scale: Tensor
    shift: Tensor


class Gated(NamedTuple):
    """Gated output that a block adds to its tokens.

    Args:
        y: [b, n, d], output of attention or a feed-forward network.
        gate: [b, d].
    """

    y: Tensor
    gate: Tensor


def modulated(
    x: Tensor,  # [b, n, d]
    added: Gated | None,
    modulations: Sequence[ScaleShift],
    eps: float,
) -> tuple[Tensor, list[Tensor]]:
    """Add gated tokens, normalise the sum and modulate it: x + gate y, norm(x + gate y) (1 + scale) + shift.

    Args:
        x: tokens.
        added: what to add to the tokens; None: nothing.
        modulations: one or two modulations of the same norm.
        eps: added to the variance.

    Returns:
        The sum, which is x itself if nothing is added, and the modulated tokens of each modulation.
    """
    given = [tensor for each in modulations for tensor in each]
    if not in_one_kernel([x, *(added or ()), *given]):
        total = x if added is None else plain_sum(x, *added)
        normed = F.layer_norm(total, (x.shape[-1],), None, None, eps)
        return total, [normed * (1 + each.scale[:, None]) + each.shift[:, None] for each in modulations]
    y, gate = (None, None) if added is None else added
    scales, shifts = zip(*modulations, strict=True)
    if torch.is_grad_enabled() and _any_gradient([x, *(added or ()), *given]):
        total, *outs = _Modulated.apply(x, y, gate, eps, *scales, *shifts)
        return (x if y is None and not x.requires_grad else total), outs
    *outs, _, _ = torch.ops.simpletune.modulate(x, y, gate, scales, shifts, eps)
    return (x if y is None else outs.pop()), outs


def add_gated(*pairs: tuple[Tensor, Gated]) -> list[Tensor]:  # [b, n, d] each
    """Compute x + gate y for each pair of tokens and what is added to them.

    Computes the sums after saving everything for the backward pass, so that a checkpoint ends its recomputation before
    them.
    """
    fused = [in_one_kernel([x, *added]) for x, added in pairs]
    grad = torch.is_grad_enabled()
    graphs = [grad and each and _any_gradient([x, *added]) for each, (x, added) in zip(fused, pairs, strict=True)]
    ready = [_Gate.apply(*added) if graph else added.y for graph, (_, added) in zip(graphs, pairs, strict=True)]
    sums = []
    for (x, added), y, in_one, graph in zip(pairs, ready, fused, graphs, strict=True):
        if graph:
            sums.append(_Added.apply(x, y, added.gate))
        else:
            sums.append((torch.ops.simpletune.add_gated if in_one else plain_sum)(x, y, added.gate))
    return sums


def in_one_kernel(tensors: Sequence[Tensor]) -> bool:
    """Whether an operator accepts these tensors. Not under autocast, which chooses its own types, or torch's compiler,
    which fuses by itself."""
    first = tensors[0]
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(first.device.type):
        return False
    same = all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
    return same and first.dtype in TYPES and first.dim() >= 3 and first.shape[-1] <= LONGEST


def _any_gradient(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


class _Modulated(torch.autograd.Function):
    """Autograd function of ``modulated``. Passes x through if nothing is added, so that the kernel also sums that use's
    gradient.

    Saves the sum, and y only if the gate or a modulation has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, y: Tensor | None, gate: Tensor | None, eps: float, *modulations: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(modulations) // 2
        scales, shifts = modulations[:count], modulations[count:]
        *outs, mean, rstd = torch.ops.simpletune.modulate(x, y, gate, scales, shifts, eps)
        total = x if y is None else outs.pop()
        ctx.trains = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(total, y if ctx.trains else None, gate, mean, rstd, *scales)
        ctx.eps = eps
        return total, *outs

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, y, gate, mean, rstd, *scales = ctx.saved_tensors
        grad_total, *grad_outs = grads
        given = [torch.zeros_like(total) if grad is None else grad for grad in grad_outs]
        tokens = [total, y, gate, grad_total]
        found = torch.ops.simpletune.modulate_backward(given, tokens, scales, [mean, rstd], ctx.eps, ctx.trains)
        own: list[Tensor | None] = [*found.pop().unbind()] if ctx.trains else [None] * (2 * len(scales) + 1)
        grad_x, grad_y = found if gate is not None else (found[0], None)
        grad_gate = own[-1] if gate is not None else None
        pairs = own[: 2 * len(scales)]
        return grad_x, grad_y, grad_gate, None, *pairs[::2], *pairs[1::2]


class _Gate(torch.autograd.Function):
    """Return y, and multiply its gradient by the gate: half of ``add_gated``.

    Separate from the sum, which saves nothing: a checkpoint ends its recomputation once the last tensor is saved, and
    so does not recompute the sum.
    """

    @staticmethod
    def forward(ctx: Context, y: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, gate)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, gate = ctx.saved_tensors
        grad_y, *own = torch.ops.simpletune.gate_backward(grads[0], y, gate)
        return grad_y, own[0] if own else None


class _Added(torch.autograd.Function):
    """Compute x + gate y. Passes the gradient unchanged to x and to y, where ``_Gate`` multiplies it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return torch.ops.simpletune.add_gated(x, y, gate)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0], None
