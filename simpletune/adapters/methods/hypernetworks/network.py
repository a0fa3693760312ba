"""The networks of a hypernetwork.

Shapes: [..., d] an attention's input, n rows of it, i inputs and o outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simpletune.adapters.methods.hypernetworks.structure import NetworkLayer, Structure

ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leakyrelu": nn.LeakyReLU,
    "elu": nn.ELU,
    "swish": nn.Hardswish,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
DEVIATION = 0.01  # standard deviation of initial weights, including those of layer norms, as in the web UI
Context = Any
"""Context of an autograd function, whose ``saved_tensors`` and ``needs_input_grad`` have no useful types."""


class _Product(torch.autograd.Function):
    """Compute x W^T + b in the type of x. Saves the weight itself for the backward pass, not a copy in the type of x:
    all attention layers of a width share the weight, and each would save its own copy."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad_y.flatten(0, -2)  # [n, o]
        grad_x = (rows @ weight.to(rows.dtype)).view(x.shape) if wants_x else None
        grad_weight = (rows.t() @ x.flatten(0, -2)).to(weight.dtype) if wants_weight else None
        grad_bias = rows.sum(0, dtype=weight.dtype) if wants_bias else None
        return grad_x, grad_weight, grad_bias


class CastLinear(nn.Linear):
    """Linear layer that computes in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:  # [..., i] -> [..., o]
        """Return x W^T + b."""
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)  # autocast converts a weight once for all its uses
        if torch.compiler.is_compiling():
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))
        y: Tensor = _Product.apply(x, self.weight, self.bias)
        return y


class CastNorm(nn.LayerNorm):
    """Layer norm that computes in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:  # [..., o] -> [..., o]
        """Normalise over the last dimension."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Network(nn.Module):
    """One network: x + strength MLP(x).

    Args:
        width: d.
        structure: its layers.
    """

    def __init__(self, width: int, structure: Structure):
        super().__init__()
        self.linear = nn.Sequential(*(_module(stage, structure) for stage in structure.stages(width)))

    def forward(self, x: Tensor, strength: float) -> Tensor:  # [..., d] -> [..., d]
        """Return h(x)."""
        return torch.add(x, self.linear(x), alpha=strength)


def _module(stage: NetworkLayer, structure: Structure) -> nn.Module:
    if stage.kind == "linear":
        return CastLinear(stage.inputs, stage.outputs)
    if stage.kind == "norm":
        return CastNorm(stage.outputs)
    return nn.Dropout(structure.dropout) if stage.kind == "dropout" else ACTIVATIONS[structure.activation]()


class Pair(NamedTuple):
    """Networks of one width."""

    k: Network
    v: Network


def random_networks(width: int, structure: Structure, dtype: torch.dtype = torch.float32) -> Pair:
    """Draw two networks from the global generator: normal weights, biases of zero.

    Weights start near zero rather than at zero, so a run starts close to its base.
    """
    pair = Pair(Network(width, structure), Network(width, structure))
    with torch.no_grad():
        for name, parameter in (each for network in pair for each in network.named_parameters()):
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=DEVIATION)
    for network in pair:
        network.to(dtype)
    return pair
