"""Operators for adaptive norms and gated sums, and for their gradients: ``simpletune::modulate`` and so on.

They are custom operators so that fake tensors and memory accounting see what CUDA allocates and moves. On CUDA each is
a Triton kernel that computes in fp32 and rounds once. Elsewhere, and where Triton cannot compile, torch's operators run
in the order of diffusers' blocks, and round after each.

Shapes: b samples, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simpletune.engine.kernels.fallback import Fallback
from simpletune.engine.kernels.sizes import NormTokens

FALLBACK = Fallback("adaptive norms, gates and residuals by torch's operators on {device}, which is slower: {reason}")

_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_LIBRARY.define("modulate(Tensor x, Tensor? y, Tensor? gate, Tensor[] scales, Tensor[] shifts, float eps) -> Tensor[]")
_LIBRARY.define(
    "modulate_backward(Tensor[] grads, Tensor?[] tokens, Tensor[] scales, Tensor[] statistics, float eps, bool trains) "
    "-> Tensor[]"
)
_LIBRARY.define("add_gated(Tensor x, Tensor y, Tensor gate) -> Tensor")
_LIBRARY.define("gate_backward(Tensor grad, Tensor? y, Tensor gate) -> Tensor[]")
for _name in ("modulate", "modulate_backward", "add_gated", "gate_backward"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # adaln.py defines the gradients


def plain_sum(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:  # [b, n, d], [b, n, d], [b, d] -> [b, n, d]
    """Compute x + gate y by torch's operators, as diffusers' blocks do."""
    return x + gate.unsqueeze(1) * y


@torch.library.register_fake("simpletune::modulate", lib=_LIBRARY)
def _(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scales: Sequence[Tensor], shifts: Sequence[Tensor], eps: float
) -> list[Tensor]:
    statistics = [x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2)]
    return [*(x.new_empty(x.shape) for _ in (*scales, *([] if y is None else [y]))), *statistics]


@torch.library.register_fake("simpletune::modulate_backward", lib=_LIBRARY)
def _(
    grads: Sequence[Tensor],
    tokens: Sequence[Tensor | None],
    scales: Sequence[Tensor],
    statistics: Sequence[Tensor],
    eps: float,
    trains: bool,
) -> list[Tensor]:
    x, _y, gate, _grad_total = NormTokens.of(tokens)
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
    statistics = [each.squeeze(2).float() for each in (mean, rstd)]  # on the CPU these have the type of x
    return [*outs, *([] if y is None else [total]), *statistics]


@torch.library.impl(_LIBRARY, "modulate_backward", "CPU")
def _modulate_backward_by_torch(
    grads: Sequence[Tensor],
    tokens: Sequence[Tensor | None],
    scales: Sequence[Tensor],
    statistics: Sequence[Tensor],
    eps: float,
    trains: bool,
) -> list[Tensor]:
    x, y, gate, grad_total = NormTokens.of(tokens)
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
def _modulate_on_cuda(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scales: Sequence[Tensor], shifts: Sequence[Tensor], eps: float
) -> list[Tensor]:
    def kernel() -> list[Tensor]:
        from simpletune.engine.kernels import adaln_kernels

        return adaln_kernels.modulate(x, y, gate, scales, shifts, eps)

    return FALLBACK.run(x.device, kernel, lambda: _modulate_by_torch(x, y, gate, scales, shifts, eps))


@torch.library.impl(_LIBRARY, "modulate_backward", "CUDA")
def _modulate_backward_on_cuda(
    grads: Sequence[Tensor],
    tokens: Sequence[Tensor | None],
    scales: Sequence[Tensor],
    statistics: Sequence[Tensor],
    eps: float,
    trains: bool,
) -> list[Tensor]:
    def kernel() -> list[Tensor]:
        from simpletune.engine.kernels import adaln_kernels

        return adaln_kernels.modulate_backward(grads, NormTokens.of(tokens), scales, statistics, trains)

    def plain() -> list[Tensor]:
        return _modulate_backward_by_torch(grads, tokens, scales, statistics, eps, trains)

    return FALLBACK.run(grads[0].device, kernel, plain)


@torch.library.impl(_LIBRARY, "add_gated", "CUDA")
def _add_on_cuda(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    def kernel() -> Tensor:
        from simpletune.engine.kernels import adaln_kernels

        return adaln_kernels.add(x, y, gate)

    return FALLBACK.run(x.device, kernel, lambda: _add_by_torch(x, y, gate))


@torch.library.impl(_LIBRARY, "gate_backward", "CUDA")
def _gate_backward_on_cuda(grad: Tensor, y: Tensor | None, gate: Tensor) -> list[Tensor]:
    def kernel() -> list[Tensor]:
        from simpletune.engine.kernels import adaln_kernels

        return adaln_kernels.gate_backward(grad, y, gate)

    return FALLBACK.run(grad.device, kernel, lambda: _gate_backward_by_torch(grad, y, gate))
