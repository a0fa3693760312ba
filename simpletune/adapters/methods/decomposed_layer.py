"""Layers that generate with DoRA of other forms than the trained one: by input channels, or of LoKr and LoHa.

The weight is W' = g (W + dW), with gains g of the outputs or of the input channels, which do not change: y = g o ((W +
dW) x), or (W + dW) (g o x).
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from simpletune.adapters.methods.layers import ADAPTER, FactorLayer, UpdateLayer, geometry_of, innermost_layer
from simpletune.adapters.methods.lora_layers import add_convolution_update, add_update


class LowRankLayer(FactorLayer):
    """Add B A x to a frozen layer's output; the factors are ``down`` [r, i], or [r, i kh kw], and ``up`` [o, r]."""

    def add_linear(self, y: Tensor, x: Tensor) -> Tensor:
        return add_update(y, x, self.factors["down"], self.factors["up"], self.strength)

    def add_convolution(self, y: Tensor, x: Tensor) -> Tensor:
        assert self.shape is not None
        down = self.factors["down"].view(-1, *self.shape[1:])
        return add_convolution_update(y, x, down, self.factors["up"], self.strength, geometry_of(self))

    def merge(self, weight: Tensor) -> Tensor:
        return weight + self.strength * (self.factors["up"] @ self.factors["down"]).view_as(weight)


class DecomposedLayer(UpdateLayer):
    """A frozen layer whose weight at strength k is W + k (W' - W).

    Args:
        base_layer: the frozen layer.
        inner: wraps the same layer, with the update dW at strength 1.
        gain: g, fp32 [o] or [i].
        by_input: whether the gains are of the input channels.
        adapter: name by which ``scaling`` holds the strength.
    """

    own_layers: ClassVar[tuple[str, ...]] = ("inner",)
    gain: Tensor

    def __init__(self, base_layer: nn.Module, inner: UpdateLayer, gain: Tensor, by_input: bool, adapter: str = ADAPTER):
        super().__init__(base_layer, adapter)
        self.inner, self.by_input = inner, by_input
        self.register_buffer("gain", gain, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            found: Tensor = self.base_layer(x)
            return found
        more = (self.gain - 1).to(x.dtype)
        more = more[:, None, None] if self.shape is not None and len(self.shape) == 4 else more
        if self.by_input:
            found = self.inner(torch.addcmul(x, x, more))
        else:
            found, bias = self.inner(x), cast(Tensor | None, innermost_layer(self).bias)
            own = found if bias is None else found - bias.to(found.dtype).view(-1, *more.shape[1:])
            found = torch.addcmul(found, own, more.to(found.dtype))
        if self.strength == 1:
            return found
        return torch.lerp(self.base_layer(x), found, self.strength)

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        place = (None,) if self.by_input else ()
        gain = self.gain[(*place, ..., *(None,) * (weight.dim() - 1 - len(place)))]
        return torch.lerp(weight, gain * self.inner.merge(weight), self.strength)
