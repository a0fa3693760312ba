"""Norms of queries or keys with the rotary positions that follow (RoPE, arXiv:2104.09864), as one operator.

torch's operators compute these in a dozen passes, most of them in fp32. The operators (``simpletune::rms_norm_rotary``)
read and write every number once, write tokens of several kinds (text, picture) one after another, and save only their
inputs. They follow the rules of ``adaln.py``.

Shapes: b samples, n tokens, h heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from simpletune.engine.kernels import rms_norm
from simpletune.engine.kernels.adaln import can_fuse
from simpletune.engine.kernels.fallback import Fallback

FALLBACK = Fallback("rotary positions by torch's operators on {device}, which is slower: {reason}")


def normalise_and_rotate(parts: Sequence[tuple[Tensor, nn.Module]], cos: Tensor, sin: Tensor) -> Tensor:
    """Apply each part's norm, join the parts, and rotate neighbouring pairs of numbers by the angles of their tokens.

    Args:
        parts: queries or keys [b, n, h, d] and their norm over the width of a head: diffusers' ``RMSNorm`` or torch's.
        cos: of the angles, fp32 [1 or b, n of all parts, d / 2].
        sin: of the angles.

    Returns:
        The joined tokens, [b, n of all parts, h, d].
    """
    xs, norms = zip(*parts, strict=True)
    weights = [norm.weight for norm in norms]
    kinds, eps = {type(norm) for norm in norms}, {norm.eps for norm in norms}
    early = kinds == {RMSNorm}
    known = (early or kinds == {nn.RMSNorm}) and not any(getattr(norm, "bias", None) is not None for norm in norms)
    if not (known and len(eps) == 1 and None not in eps and None not in weights and can_fuse([*xs, *weights])):
        normed = [rms_norm.normalise(x, norm) for x, norm in parts]
        return _rotate(torch.cat(normed, dim=1) if len(normed) > 1 else normed[0], cos, sin, early)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*xs, *weights)):
        found: Tensor = _NormaliseAndRotate.apply(cos, sin, eps.pop(), early, *xs, *weights)
        return found
    return CALLS["rms_norm_rotary"](list(xs), weights, cos, sin, eps.pop(), early)


class _NormaliseAndRotate(torch.autograd.Function):
    """Autograd function of ``normalise_and_rotate``; saves its inputs."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, eps: float, early: bool, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, *tensors)
        ctx.eps, ctx.early = eps, early
        count = len(tensors) // 2
        return CALLS["rms_norm_rotary"](list(tensors[:count]), list(tensors[count:]), cos, sin, eps, early)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *tensors = ctx.saved_tensors
        count = len(tensors) // 2
        xs, weights, trains = tensors[:count], tensors[count:], any(ctx.needs_input_grad[4 + count :])
        given = grads[0], xs, weights, cos, sin, ctx.eps, ctx.early, trains
        found = CALLS["rms_norm_rotary_backward"](*given)
        return None, None, None, None, *found, *([] if trains else [None] * count)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, as_complex: bool) -> Tensor:
    """Rotate by torch's operators, as the models of diffusers do: by products of complex numbers, or of real ones."""
    if as_complex:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)[:, :, None]).flatten(3).type_as(x)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(3)
    return (x.float() * _of_each(cos) + turned.float() * _of_each(sin)).to(x.dtype)


def _rotate_back(grad: Tensor, cos: Tensor, sin: Tensor, as_complex: bool) -> Tensor:
    """Compute the gradient of ``_rotate``, which rounds both products of real numbers before it adds them."""
    if as_complex:
        pairs = torch.view_as_complex(grad.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)[:, :, None].conj()).flatten(3).type_as(grad)
    even, odd = (grad.float() * _of_each(sin)).to(grad.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return (grad.float() * _of_each(cos)).to(grad.dtype) + torch.stack([odd, -even], dim=-1).flatten(3)


def _of_each(table: Tensor) -> Tensor:  # [1 or b, n, d / 2] -> [1 or b, n, 1, d]
    return table.repeat_interleave(2, dim=-1)[:, :, None]


def _norm_by_torch(x: Tensor, weight: Tensor, eps: float, early: bool) -> Tensor:
    """Apply a norm as diffusers' class does, which rounds before the product with the weight (``early``), or torch's,
    which rounds after it."""
    if early:
        return rms_norm.by_torch(x, weight, eps)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _norm_backward_by_torch(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, early: bool, trains: bool
) -> list[Tensor]:
    if early:
        return rms_norm.backward_by_torch(grad, x, weight, eps, trains)
    wide, given = x.float(), grad.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wanted = given * weight
    of_mean = (wanted * wide).sum(-1, keepdim=True) * (inverse.pow(3) * -0.5)
    grad_x = (wanted * inverse + of_mean.expand_as(wide) / x.shape[-1] * (wide * 2.0)).to(x.dtype)
    return [grad_x, *([(given * (wide * inverse)).sum((0, 1, 2)).to(weight.dtype)] if trains else [])]


def _by_torch(
    parts: Sequence[Tensor], weights: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float, early: bool
) -> Tensor:
    normed = [_norm_by_torch(x, weight, eps, early) for x, weight in zip(parts, weights, strict=True)]
    return _rotate(torch.cat(normed, dim=1), cos, sin, early)


def _backward_by_torch(
    grad: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    early: bool,
    trains: bool,
) -> list[Tensor]:
    """Compute the gradients of the parts, and of all weights if one trains."""
    grads = _rotate_back(grad, cos, sin, early).split([x.shape[1] for x in parts], dim=1)
    found = [
        _norm_backward_by_torch(part, x, weight, eps, early, trains)
        for part, x, weight in zip(grads, parts, weights, strict=True)
    ]
    return [each[number] for number in range(1 + trains) for each in found]


_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_OPERATORS: dict[str, Callable[..., object]] = {
    "rms_norm_rotary(Tensor[] parts, Tensor[] weights, Tensor cos, Tensor sin, float eps, bool early) -> Tensor": (
        _by_torch
    ),
    "rms_norm_rotary_backward(Tensor grad, Tensor[] parts, Tensor[] weights, Tensor cos, Tensor sin, float eps, "
    "bool early, bool trains) -> Tensor[]": _backward_by_torch,
}
CALLS = {
    schema.partition("(")[0]: FALLBACK.define(_LIBRARY, schema, plain, "simpletune.engine.kernels.rotary_kernels")
    for schema, plain in _OPERATORS.items()
}


@torch.library.register_fake("simpletune::rms_norm_rotary", lib=_LIBRARY)
def _(parts: Sequence[Tensor], weights: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float, early: bool) -> Tensor:
    b, _, h, d = parts[0].shape
    return parts[0].new_empty((b, sum(x.shape[1] for x in parts), h, d))


@torch.library.register_fake("simpletune::rms_norm_rotary_backward", lib=_LIBRARY)
def _(
    grad: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    early: bool,
    trains: bool,
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (*parts, *(weights if trains else ()))]
