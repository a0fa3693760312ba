"""SwiGLU (arXiv:2002.05202, eq. 6), silu(gate) * value, as one operator each for forward and backward.

torch's operators save silu(gate) besides their inputs, and where gate and value are halves of one tensor, write its
gradient as two tensors, each padded with zeros, and their sum. The operators (``simpletune::swiglu``) save their inputs
alone and write one gradient. They follow the rules of ``adaln.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simpletune.engine.kernels.adaln import can_fuse
from simpletune.engine.kernels.fallback import Fallback

FALLBACK = Fallback("SwiGLU by torch's operators on {device}, which is slower: {reason}")


def swiglu(x: Tensor, value: Tensor | None = None) -> Tensor:  # [..., 2 d] or [..., d], [..., d] -> [..., d]
    """Compute silu(gate) * value, where x is the gate, or without ``value`` gate and value beside each other."""
    given = [x] if value is None else [x, value]
    if not can_fuse(given, math.inf):
        return _by_torch(*_gate_and_value(x, value))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        found: Tensor = _SwiGLU.apply(x, value)
        return found
    return CALLS["swiglu"](*_gate_and_value(x, value))


class _SwiGLU(torch.autograd.Function):
    """Autograd function of ``swiglu``; saves its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, value)
        return CALLS["swiglu"](*_gate_and_value(x, value))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, value = ctx.saved_tensors
        found = CALLS["swiglu_backward"](grads[0], *_gate_and_value(x, value), value is None)
        return found[0], None if value is None else found[1]


def _gate_and_value(x: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    d = x.shape[-1] // 2
    return (x[..., :d], x[..., d:]) if value is None else (x, value)


def _by_torch(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def _backward_by_torch(grad: Tensor, gate: Tensor, value: Tensor, joined: bool) -> list[Tensor]:
    """Compute the gradients of gate and value; ``joined``: as halves of one tensor."""
    found = [torch.ops.aten.silu_backward(grad * value, gate), grad * F.silu(gate)]
    return [torch.cat(found, dim=-1)] if joined else found


_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_OPERATORS: dict[str, Callable[..., object]] = {
    "swiglu(Tensor gate, Tensor value) -> Tensor": _by_torch,
    "swiglu_backward(Tensor grad, Tensor gate, Tensor value, bool joined) -> Tensor[]": _backward_by_torch,
}
CALLS = {
    schema.partition("(")[0]: FALLBACK.define(_LIBRARY, schema, plain, "simpletune.engine.kernels.swiglu_kernels")
    for schema, plain in _OPERATORS.items()
}


@torch.library.register_fake("simpletune::swiglu", lib=_LIBRARY)
def _(gate: Tensor, value: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.register_fake("simpletune::swiglu_backward", lib=_LIBRARY)
def _(grad: Tensor, gate: Tensor, value: Tensor, joined: bool) -> list[Tensor]:
    if joined:
        return [gate.new_empty((*gate.shape[:-1], 2 * gate.shape[-1]))]
    return [gate.new_empty(gate.shape), value.new_empty(value.shape)]
