"""A hypernetwork's networks, and the layers that put them before the keys and values of attention.

Shapes: [..., d] an attention's input, n rows of it, i inputs and o outputs of a linear layer or projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simpletune.adapters.methods.hypernetwork_structure import Structure
from simpletune.adapters.methods.layers import ADAPTER, UpdateLayer, innermost_layer, outer_layers, shape_of, wrap
from simpletune.adapters.methods.lora_layers import Context
from simpletune.engine.tensors import all_tensors
from simpletune.models.lora_registry import context_layers
from simpletune.system.options import UserError

ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leakyrelu": nn.LeakyReLU,
    "elu": nn.ELU,
    "swish": nn.Hardswish,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
DEVIATION = 0.01  # standard deviation of initial weights, including those of layer norms, as in the web UI


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
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)  # autocast converts a weight once for all its uses
        if torch.compiler.is_compiling():
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))
        y: Tensor = _Product.apply(x, self.weight, self.bias)
        return y


class CastNorm(nn.LayerNorm):
    """Layer norm that computes in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:  # [..., o] -> [..., o]
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Network(nn.Module):
    """One network: h(x) = x + strength MLP(x)."""

    def __init__(self, width: int, structure: Structure):
        super().__init__()
        layers: list[nn.Module] = []
        for kind, inputs, outputs in structure.stages(width):
            if kind == "linear":
                layers.append(CastLinear(inputs, outputs))
            elif kind == "norm":
                layers.append(CastNorm(outputs))
            else:
                layers.append(
                    nn.Dropout(structure.dropout) if kind == "dropout" else ACTIVATIONS[structure.activation]()
                )
        self.linear = nn.Sequential(*layers)

    def forward(self, x: Tensor, strength: float) -> Tensor:  # [..., d] -> [..., d]
        return torch.add(x, self.linear(x), alpha=strength)


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


class HypernetworkLayer(UpdateLayer):
    """Projection to keys or values that reads h(x) instead of x. All of a kind (keys or values) and width share a
    network. The projection may have updates of its own."""

    def __init__(self, base_layer: nn.Module, network: Network, adapter: str = ADAPTER):
        super().__init__(base_layer, adapter)
        self.network = network

    def forward(self, x: Tensor) -> Tensor:  # [..., d] -> [..., o]
        y: Tensor = self.base_layer(self.network(x, self.strength) if self.enabled else x)
        return y

    def merge(self, weight: Tensor) -> Tensor:
        raise UserError(
            "a hypernetwork is a function of the attention's inputs, so no weights can contain it. Draw with it "
            "instead: --lora FILE"
        )


def put_before(model: nn.Module, pairs: Mapping[int, Pair], adapter: str = ADAPTER) -> None:
    """Put the networks of each width before a U-Net's projections to keys and values whose input has it, in place.
    Raises UserError if the model has no attention of one of the widths."""
    missing = dict(pairs)
    modules = dict(model.named_modules())
    sides = {name: shape_of(innermost_layer(modules[name])) for name in context_layers(modules)}
    for name, shape in sides.items():
        if shape is None or shape[1] not in pairs:
            continue
        missing.pop(shape[1], None)
        network = pairs[shape[1]].k if name.endswith("k") else pairs[shape[1]].v
        layer = model.get_submodule(name)
        network.to(next(tensor.device for tensor in all_tensors(layer)))
        wrap(model, name, HypernetworkLayer(layer, network, adapter))
    if missing:
        known = sorted({shape[1] for shape in sides.values() if shape is not None})
        known_words = f"its attention reads widths {', '.join(map(str, known))}" if known else "it is no U-Net"
        raise UserError(
            f"a hypernetwork for attention inputs of width {', '.join(map(str, missing))} does not fit this model: "
            f"{known_words}. Use one that was trained on this model"
        )


def networks_of(model: nn.Module) -> dict[int, Pair]:
    """Return a model's trained networks by width."""
    found: dict[int, dict[str, Network]] = {}
    for name, layer in outer_layers(model):
        if isinstance(layer, HypernetworkLayer):
            assert layer.shape is not None
            found.setdefault(layer.shape[1], {})[name[-1]] = layer.network
    return {width: Pair(**sides) for width, sides in sorted(found.items())}
