"""Norms of queries, keys and tokens (RMSNorm, arXiv:1910.07467) as one operator each, forward and backward.

diffusers computes each by eight of torch's operators, half of them in fp32, and keeps an fp32 copy. The operators
(``simpletune::rms_norm``) follow the rules of ``adaln.py``.

Shapes: b samples, n tokens, h heads, d width of a head, or of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from simpletune.engine.kernels.adaln import can_fuse
from simpletune.engine.kernels.fallback import Fallback

FALLBACK = Fallback("norms without means by torch's operators on {device}, which is slower: {reason}")


def normalise(x: Tensor, norm: nn.Module) -> Tensor:  # [b, n, d] or [b, n, h, d]
    """Apply a norm: x / sqrt(mean(x^2) + eps) * weight, over the last dimension. A norm that is not diffusers'
    ``RMSNorm`` is called as it is."""
    weight = norm.weight if type(norm) is RMSNorm and norm.bias is None else None
    if weight is None or not can_fuse([x, weight]):
        found: Tensor = norm(x)
        return found
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        found = _Normalise.apply(x, weight, norm.eps)
        return found
    return CALLS["rms_norm"](x, weight, norm.eps)


class _Normalise(torch.autograd.Function):
    """Autograd function of ``normalise``; saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return CALLS["rms_norm"](x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        grad_x, *own = CALLS["rms_norm_backward"](grads[0], x, weight, ctx.eps, trains)
        return grad_x, own[0] if trains else None, None


def _parts(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fp32 copy, the inverse root, and their product in the type of x."""
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide, inverse, (x * inverse).to(x.dtype)


def by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _parts(x, eps)[2] * weight


def backward_by_torch(grad: Tensor, x: Tensor, weight: Tensor, eps: float, trains: bool) -> list[Tensor]:
    wide, inverse, scaled = _parts(x, eps)
    given = (grad * weight).float()
    of_inverse = (given * x).sum(-1, keepdim=True)
    of_mean = -0.5 * of_inverse * inverse.pow(3)
    grad_x = (of_mean.expand_as(wide) / x.shape[-1] * (2 * wide)).to(x.dtype) + (given * inverse).to(x.dtype)
    return [grad_x, *([(grad * scaled).sum(tuple(range(x.dim() - 1)))] if trains else [])]


_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_OPERATORS: dict[str, Callable[..., object]] = {
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor": by_torch,
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps, bool trains) -> Tensor[]": backward_by_torch,
}
CALLS = {
    schema.partition("(")[0]: FALLBACK.define(_LIBRARY, schema, plain, "simpletune.engine.kernels.rms_kernels")
    for schema, plain in _OPERATORS.items()
}


@torch.library.register_fake("simpletune::rms_norm", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("simpletune::rms_norm_backward", lib=_LIBRARY)
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float, trains: bool) -> list[Tensor]:
    return [x.new_empty(x.shape), *([weight.new_empty(weight.shape)] if trains else [])]
