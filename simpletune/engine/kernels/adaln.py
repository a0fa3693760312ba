"""Adaptive norms and gated sums of a transformer block, each as one operator.

out = norm(x) (1 + scale) + shift and x + gate y (adaLN-Zero, arXiv:2212.09748, section 3.2). The gated sum and the norm
that follows it are one operator, and so are the gradients that meet before it: torch's operators would write every
intermediate result and read it again.

They are custom operators (``simpletune::modulate`` and so on), so that fake tensors and memory accounting see what
CUDA allocates and moves. On CUDA each is a Triton kernel (adaln_kernels.py) that computes in fp32 and rounds once.
Elsewhere, and where Triton cannot compile, torch's operators run in the order of diffusers' blocks, and round after
each.

Shapes: b samples, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from simpletune.engine.kernels.fallback import Fallback
from simpletune.engine.kernels.sizes import LONGEST

TYPES = (torch.bfloat16, torch.float16, torch.float32)
FALLBACK = Fallback("adaptive norms, gates and residuals by torch's operators on {device}, which is slower: {reason}")


class ScaleShift(NamedTuple):
    """Scale (factor minus one) and shift of normalised tokens, [b, d] each."""

    scale: Tensor
    shift: Tensor


class GatedTokens(NamedTuple):
    """What a block adds to its tokens: output y [b, n, d] of attention or a feed-forward network, and gate [b, d]."""

    y: Tensor
    gate: Tensor


def normalise_and_modulate(
    x: Tensor,  # [b, n, d]
    added: GatedTokens | None,
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
    tensors = [x, *(added or ()), *(tensor for each in modulations for tensor in each)]
    if not can_fuse(tensors):
        total = x if added is None else _sum_by_torch(x, *added)
        normed = F.layer_norm(total, (x.shape[-1],), None, None, eps)
        return total, [normed * (1 + each.scale[:, None]) + each.shift[:, None] for each in modulations]
    y, gate = (None, None) if added is None else added
    scales, shifts = zip(*modulations, strict=True)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        total, *outs = _Modulate.apply(x, y, gate, eps, *scales, *shifts)
        return (x if y is None and not x.requires_grad else total), outs
    *outs, _, _ = CALLS["modulate"](x, y, gate, scales, shifts, eps)
    return (x if y is None else outs.pop()), outs


def add_gated(*pairs: tuple[Tensor, GatedTokens]) -> list[Tensor]:  # [b, n, d] each
    """Compute x + gate y for each pair of tokens and what is added to them.

    Computes the sums after saving everything for the backward pass, so that a checkpoint ends its recomputation before
    them.
    """
    fused = [can_fuse([x, *added]) for x, added in pairs]
    graphs = [
        torch.is_grad_enabled() and each and any(tensor.requires_grad for tensor in (x, *added))
        for each, (x, added) in zip(fused, pairs, strict=True)
    ]
    ready = [_Gate.apply(*added) if graph else added.y for graph, (_, added) in zip(graphs, pairs, strict=True)]
    sums = []
    for (x, added), y, in_one, graph in zip(pairs, ready, fused, graphs, strict=True):
        if graph:
            sums.append(_AddGated.apply(x, y, added.gate))
        else:
            sums.append((CALLS["add_gated"] if in_one else _sum_by_torch)(x, y, added.gate))
    return sums


def can_fuse(tensors: Sequence[Tensor], widest: float = LONGEST) -> bool:
    """Return whether an operator accepts these tensors, of at most this width. Not on the meta device, under autocast,
    which chooses its own types, or torch's compiler, which fuses by itself."""
    first = tensors[0]
    if first.device.type == "meta" or torch.compiler.is_compiling() or torch.is_autocast_enabled(first.device.type):
        return False
    same = all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
    return same and first.dtype in TYPES and first.dim() >= 3 and first.shape[-1] <= widest


class _Modulate(torch.autograd.Function):
    """Autograd function of ``normalise_and_modulate``. Passes x through if nothing is added, so that the kernel also
    sums that use's gradient.

    Saves the sum, and y only if the gate or a modulation has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, gate: Tensor | None, eps: float, *modulations: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(modulations) // 2
        scales, shifts = modulations[:count], modulations[count:]
        *outs, mean, rstd = CALLS["modulate"](x, y, gate, scales, shifts, eps)
        total = x if y is None else outs.pop()
        ctx.trains = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(total, y if ctx.trains else None, gate, mean, rstd, *scales)
        ctx.eps = eps
        return total, *outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, y, gate, mean, rstd, *scales = ctx.saved_tensors
        grad_total, *grad_outs = grads
        given = [torch.zeros_like(total) if grad is None else grad for grad in grad_outs]
        found = CALLS["modulate_backward"](given, total, y, gate, grad_total, scales, [mean, rstd], ctx.eps, ctx.trains)
        own: list[Tensor | None] = [*found.pop().unbind()] if ctx.trains else [None] * (2 * len(scales) + 1)
        grad_x, grad_y = found if gate is not None else (found[0], None)
        grad_gate = own[-1] if gate is not None else None
        pairs = own[: 2 * len(scales)]
        return grad_x, grad_y, grad_gate, None, *pairs[::2], *pairs[1::2]


class _Gate(torch.autograd.Function):
    """The backward half of ``add_gated``: y unchanged, and its gradient multiplied by the gate.

    Separate from the sum, which saves nothing: a checkpoint ends its recomputation once the last tensor is saved, and
    so does not recompute the sum.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, gate)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, gate = ctx.saved_tensors
        grad_y, *own = CALLS["gate_backward"](grads[0], y, gate)
        return grad_y, own[0] if own else None


class _AddGated(torch.autograd.Function):
    """The sum x + gate y. Passes the gradient unchanged to x and to y, where ``_Gate`` multiplies it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return CALLS["add_gated"](x, y, gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0], None


def _sum_by_torch(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:  # [b, n, d], [b, n, d], [b, d] -> [b, n, d]
    return x + gate.unsqueeze(1) * y


def _modulate_by_torch(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scales: Sequence[Tensor], shifts: Sequence[Tensor], eps: float
) -> list[Tensor]:
    total = x if y is None or gate is None else _sum_by_torch(x, y, gate)
    normed, mean, rstd = torch.native_layer_norm(total, (x.shape[2],), None, None, eps)
    outs = [normed * (1 + scale[:, None]) + shift[:, None] for scale, shift in zip(scales, shifts, strict=True)]
    statistics = [each.squeeze(2).float() for each in (mean, rstd)]  # on the CPU these have the type of x
    return [*outs, *([] if y is None else [total]), *statistics]


def _modulate_backward_by_torch(
    grads: Sequence[Tensor],  # of each modulation's tokens [b, n, d]
    x: Tensor,  # the tokens that were normalised
    y: Tensor | None,  # what had been added to them, if saved
    gate: Tensor | None,  # None: nothing had been added
    grad_total: Tensor | None,  # the gradient of x from elsewhere
    scales: Sequence[Tensor],
    statistics: Sequence[Tensor],  # mean and inverse deviation, fp32 [b, n]
    eps: float,
    trains: bool,  # whether gate and modulations have gradients
) -> list[Tensor]:
    """Compute the gradients of x, of y if there is a gate, and, [count, b, d], of each scale and shift in turn, then of
    the gate."""
    wanted, *more = (grad * (1 + scale[:, None]) for grad, scale in zip(grads, scales, strict=True))
    for grad in more:
        wanted = wanted + grad
    mean, rstd = (each.unsqueeze(2) if x.is_cuda else each.unsqueeze(2).to(x.dtype) for each in statistics)
    shape, mask = (x.shape[2],), [True, False, False]
    grad_x = torch.ops.aten.native_layer_norm_backward(wanted, x, shape, mean, rstd, None, None, mask)[0]
    grad_x = grad_x if grad_total is None else grad_total + grad_x
    found = [grad_x] if gate is None else [grad_x, grad_x * gate.unsqueeze(1)]
    if trains:
        normed = torch.native_layer_norm(x, shape, None, None, eps)[0]
        own = [sums for grad in grads for sums in ((grad * normed).sum(1), grad.sum(1))]
        found.append(torch.stack(own if y is None else [*own, (grad_x * y).sum(1)]))
    return found


def _gate_backward_by_torch(grad: Tensor, y: Tensor | None, gate: Tensor) -> list[Tensor]:
    return [grad * gate.unsqueeze(1), *([] if y is None else [(grad * y).sum(1).unsqueeze(0)])]


_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_OPERATORS: dict[str, Callable[..., object]] = {
    "modulate(Tensor x, Tensor? y, Tensor? gate, Tensor[] scales, Tensor[] shifts, float eps) -> Tensor[]": (
        _modulate_by_torch
    ),
    "modulate_backward(Tensor[] grads, Tensor x, Tensor? y, Tensor? gate, Tensor? grad_total, Tensor[] scales, "
    "Tensor[] statistics, float eps, bool trains) -> Tensor[]": _modulate_backward_by_torch,
    "add_gated(Tensor x, Tensor y, Tensor gate) -> Tensor": _sum_by_torch,
    "gate_backward(Tensor grad, Tensor? y, Tensor gate) -> Tensor[]": _gate_backward_by_torch,
}
CALLS = {
    schema.partition("(")[0]: FALLBACK.define(_LIBRARY, schema, plain, "simpletune.engine.kernels.adaln_kernels")
    for schema, plain in _OPERATORS.items()
}


@torch.library.register_fake("simpletune::modulate", lib=_LIBRARY)
def _(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scales: Sequence[Tensor], shifts: Sequence[Tensor], eps: float
) -> list[Tensor]:
    statistics = [x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2)]
    return [*(x.new_empty(x.shape) for _ in (*scales, *([] if y is None else [y]))), *statistics]


@torch.library.register_fake("simpletune::modulate_backward", lib=_LIBRARY)
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    grad_total: Tensor | None,
    scales: Sequence[Tensor],
    statistics: Sequence[Tensor],
    eps: float,
    trains: bool,
) -> list[Tensor]:
    found = [x.new_empty(x.shape) for _ in range(1 if gate is None else 2)]
    count = 2 * len(scales) + (gate is not None)
    return [*found, *([x.new_empty((count, x.shape[0], x.shape[2]))] if trains else [])]


@torch.library.register_fake("simpletune::add_gated", lib=_LIBRARY)
def _(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("simpletune::gate_backward", lib=_LIBRARY)
def _(grad: Tensor, y: Tensor | None, gate: Tensor) -> list[Tensor]:
    own = [] if y is None else [grad.new_empty((1, grad.shape[0], grad.shape[2]))]
    return [grad.new_empty(grad.shape), *own]
