"""Adaptive norms and gated sums of a transformer block, each as one operator.

out = norm(x) (1 + scale) + shift and x + gate y (adaLN-Zero, arXiv:2212.09748, section 3.2). The gated sum and the norm
that follows it are one operator, and so are the gradients that meet before it: torch's operators would write every
intermediate result and read it again. The operators (``simpletune::modulate`` and so on) are custom ones, so that fake
tensors and memory accounting see what CUDA allocates and moves. On CUDA each is a Triton kernel that computes in fp32
and rounds once; elsewhere, and where Triton cannot compile, torch's operators in the order of diffusers' blocks, which
round in between.

Shapes: b samples, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from simpletune.elementwise.attempt import attempt
from simpletune.elementwise.sizes import LONGEST

_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_LIBRARY.define("modulate(Tensor x, Tensor? y, Tensor? gate, Tensor[] scales, Tensor[] shifts, float eps) -> Tensor[]")
_LIBRARY.define(
    "modulate_backward(Tensor[] grads, Tensor? grad_total, Tensor x, Tensor? y, Tensor? gate, Tensor[] scales, "
    "Tensor[] statistics, float eps, bool trains) -> Tensor[]"
)
_LIBRARY.define("add_gated(Tensor x, Tensor y, Tensor gate) -> Tensor")
_LIBRARY.define("gate_backward(Tensor grad, Tensor? y, Tensor gate) -> Tensor[]")
for _name in ("modulate", "modulate_backward", "add_gated", "gate_backward"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # the functions below define gradients

TYPES = (torch.bfloat16, torch.float16, torch.float32)
Context = Any
"""An autograd function's, whose saved tensors and needs have no useful types."""


class Modulation(NamedTuple):
    """What a normalised token is multiplied by, less one, and what is added.

    Args:
        scale: [b, d].
        shift: [b, d].
    """

    scale: Tensor
    shift: Tensor


class Gated(NamedTuple):
    """What a block adds to its tokens.

    Args:
        y: [b, n, d], of attention or a feed-forward network.
        gate: [b, d].
    """

    y: Tensor
    gate: Tensor


def modulated(
    x: Tensor,  # [b, n, d]
    added: Gated | None,
    modulations: Sequence[Modulation],
    eps: float,
) -> tuple[Tensor, list[Tensor]]:
    """Add gated tokens, normalise the sum and modulate it: x + gate y, norm(x + gate y) (1 + scale) + shift.

    Args:
        x: tokens.
        added: to the tokens; None: nothing.
        modulations: one or two, of the same norm.
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

    The sums come after everything that is saved for the backward pass: a checkpoint ends its recomputation before them.
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


def plain_sum(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:  # [b, n, d], [b, n, d], [b, d] -> [b, n, d]
    """x + gate y by torch's operators, as diffusers' blocks have it."""
    return x + gate.unsqueeze(1) * y


def in_one_kernel(tensors: Sequence[Tensor]) -> bool:
    """Whether an operator takes these tensors. Autocast has types of its own, and torch's compiler fuses by itself."""
    first = tensors[0]
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(first.device.type):
        return False
    same = all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
    return same and first.dtype in TYPES and first.dim() >= 3 and first.shape[-1] <= LONGEST


def _any_gradient(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


class _Modulated(torch.autograd.Function):
    """``modulated``. Passes x through if nothing is added, so that the gradient of that use joins in the kernel.

    Saves the sum, and y only if the gate has a gradient.
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
        found = torch.ops.simpletune.modulate_backward(
            given, grad_total, total, y, gate, scales, [mean, rstd], ctx.eps, ctx.trains
        )
        own: list[Tensor | None] = [*found.pop().unbind()] if ctx.trains else [None] * (2 * len(scales) + 1)
        grad_x, grad_y = found if gate is not None else (found[0], None)
        grad_gate = own[-1] if gate is not None else None
        pairs = own[: 2 * len(scales)]
        return grad_x, grad_y, grad_gate, None, *pairs[::2], *pairs[1::2]


class _Gate(torch.autograd.Function):
    """Return y, and multiply its gradient by the gate: half of ``add_gated``.

    By itself, because a checkpoint ends its recomputation when the last tensor has been saved: the sum, which saves
    nothing, is not computed again.
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
    """x + gate y, whose gradient goes to x and, for ``_Gate``, to y as it is."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return torch.ops.simpletune.add_gated(x, y, gate)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0], None


@torch.library.register_fake("simpletune::modulate", lib=_LIBRARY)
def _(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scales: Sequence[Tensor], shifts: Sequence[Tensor], eps: float
) -> list[Tensor]:
    statistics = [x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2)]
    return [*(x.new_empty(x.shape) for _ in (*scales, *([] if y is None else [y]))), *statistics]


@torch.library.register_fake("simpletune::modulate_backward", lib=_LIBRARY)
def _(
    grads: Sequence[Tensor], grad_total: Tensor | None, x: Tensor, y: Tensor | None, gate: Tensor | None,
    scales: Sequence[Tensor], statistics: Sequence[Tensor], eps: float, trains: bool,
) -> list[Tensor]:  # fmt: skip
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


@torch.library.impl(_LIBRARY, "modulate", "CPU")
def _modulate_by_torch(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scales: Sequence[Tensor], shifts: Sequence[Tensor], eps: float
) -> list[Tensor]:
    total = x if y is None or gate is None else plain_sum(x, y, gate)
    normed, mean, rstd = torch.native_layer_norm(total, (x.shape[2],), None, None, eps)
    outs = [normed * (1 + scale[:, None]) + shift[:, None] for scale, shift in zip(scales, shifts, strict=True)]
    statistics = [each.squeeze(2).float() for each in (mean, rstd)]  # the CPU's have the type of x
    return [*outs, *([] if y is None else [total]), *statistics]


@torch.library.impl(_LIBRARY, "modulate_backward", "CPU")
def _modulate_backward_by_torch(
    grads: Sequence[Tensor], grad_total: Tensor | None, x: Tensor, y: Tensor | None, gate: Tensor | None,
    scales: Sequence[Tensor], statistics: Sequence[Tensor], eps: float, trains: bool,
) -> list[Tensor]:  # fmt: skip
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


@torch.library.impl(_LIBRARY, "add_gated", "CPU")
def _add_by_torch(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return plain_sum(x, y, gate)


@torch.library.impl(_LIBRARY, "gate_backward", "CPU")
def _gate_backward_by_torch(grad: Tensor, y: Tensor | None, gate: Tensor) -> list[Tensor]:
    return [grad * gate.unsqueeze(1), *([] if y is None else [(grad * y).sum(1).unsqueeze(0)])]


@torch.library.impl(_LIBRARY, "modulate", "CUDA")
def _modulate_on_cuda(x: Tensor, *others: Any) -> list[Tensor]:
    def kernel() -> list[Tensor]:
        from simpletune.elementwise import adaln_kernels

        return adaln_kernels.modulate(x, *others)

    return attempt(x.device, kernel, lambda: _modulate_by_torch(x, *others))


@torch.library.impl(_LIBRARY, "modulate_backward", "CUDA")
def _modulate_backward_on_cuda(grads: Sequence[Tensor], *others: Any) -> list[Tensor]:
    def kernel() -> list[Tensor]:
        from simpletune.elementwise import adaln_kernels

        return adaln_kernels.modulate_backward(grads, *others)

    return attempt(grads[0].device, kernel, lambda: _modulate_backward_by_torch(grads, *others))


@torch.library.impl(_LIBRARY, "add_gated", "CUDA")
def _add_on_cuda(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    def kernel() -> Tensor:
        from simpletune.elementwise import adaln_kernels

        return adaln_kernels.add(x, y, gate)

    return attempt(x.device, kernel, lambda: _add_by_torch(x, y, gate))


@torch.library.impl(_LIBRARY, "gate_backward", "CUDA")
def _gate_backward_on_cuda(grad: Tensor, y: Tensor | None, gate: Tensor) -> list[Tensor]:
    def kernel() -> list[Tensor]:
        from simpletune.elementwise import adaln_kernels

        return adaln_kernels.gate_backward(grad, y, gate)

    return attempt(grad.device, kernel, lambda: _gate_backward_by_torch(grad, y, gate))
