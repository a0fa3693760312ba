"""Attention: compute the card's kernels with the CPU's flash kernel, which has a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Named = dict[str, Any]


def _plain(name: str, arguments: Named) -> None:
    if arguments.get("dropout_p"):
        raise NotImplementedError(f"softgpu: {name} with dropout has no values here")


def _bound(function: torch._ops.OpOverload, args: list, kwargs: Named) -> Named:
    """The arguments of a call by name, with defaults."""
    found = {}
    for number, argument in enumerate(function._schema.arguments):
        if number < len(args):
            found[argument.name] = args[number]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found


def forward(function: torch._ops.OpOverload, out: tuple, args: list, kwargs: Named) -> Callable[[], None]:
    """The values of a forward pass: the output and the logarithms of its sums."""
    given = _bound(function, args, kwargs)
    _plain(function._schema.name, given)

    def work() -> None:
        result, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            given["query"], given["key"], given["value"], 0.0, given["is_causal"],
            attn_mask=given.get("attn_bias"), scale=given["scale"],
        )  # fmt: skip
        out[0].copy_(result)
        if out[1].numel():  # efficient attention pads them to a multiple of 32
            out[1][..., : sums.shape[-1]].copy_(sums.view(*out[1].shape[:-1], -1))

    return work


def backward(function: torch._ops.OpOverload, out: tuple, args: list, kwargs: Named) -> Callable[[], None]:
    """The gradients of query, key and value."""
    given = _bound(function, args, kwargs)
    _plain(function._schema.name, given)
    if len(out) > 3 and out[3] is not None and out[3].numel():
        raise NotImplementedError(f"softgpu: {function._schema.name} has no gradient of the mask here")

    def work() -> None:
        q, sums = given["query"], given["logsumexp"]
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            given.get("grad_out", given.get("grad_out_")), q, given["key"], given["value"], given["out"],
            sums[..., : q.shape[2]].contiguous(), 0.0, given["is_causal"],
            attn_mask=given.get("attn_bias"), scale=given["scale"],
        )  # fmt: skip
        for target, value in zip(out, gradients, strict=False):
            if isinstance(target, Tensor):
                target.copy_(value)

    return work


RULES = {
    "aten::_scaled_dot_product_flash_attention": forward,
    "aten::_scaled_dot_product_efficient_attention": forward,
    "aten::_scaled_dot_product_flash_attention_backward": backward,
    "aten::_scaled_dot_product_efficient_attention_backward": backward,
}
