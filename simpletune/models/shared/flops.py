"""Count the floating-point operations of a training step from shapes alone.

Counts only matrix products and convolutions, which are nearly all of the arithmetic; a multiply-add is two operations.
Covers the trained model's forward pass, including attention, and the part of its backward pass that training needs: one
product for each trained weight, and one for each input that carries a gradient. Recomputation by checkpointing is
counted separately, because model FLOPs utilisation excludes it (arXiv:2204.02311, appendix B). Excludes the
recomputation of scores in fused attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simpletune.models.shared.model_config import Shape

FACTOR = re.compile(r"\.(lora_[AB]|magnitude|lokr_w[12](?:_[ab])?|hada_w[12]_[ab]|oft_triangle)(?:\..*)?$")
"""What follows a layer's name in the name of an update's trained factor."""
NETWORK = re.compile(r"\.to_([kv])\.network\.linear\.\d+\.(?:weight|bias)$")
"""The end of the name of a hypernetwork's trained parameter, after the first attention that holds it."""


@dataclass
class Flops:
    """Floating-point operations of one micro-batch."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    """Operations repeated by checkpointing, and by LoKr's products, which keep only their input."""

    @property
    def model(self) -> int:
        """Operations without recomputation."""
        return self.forward + self.backward


class UpdateProducts(NamedTuple):
    """The products of a layer's update, in order, as multiply-adds for each row of the layer's input."""

    products: tuple[int, ...]  # the forward pass's products; those between factors alone are not counted
    recomputed: int = 0  # the products that the backward pass repeats
    constant: tuple[int, int] = (0, 0)
    """Multiply-adds forward and backward that do not depend on the number of rows: DoRA's norms, and the gradient of
    OFT's rotations."""


@dataclass(frozen=True)
class TrainedParameters:
    """The trained parameters: names of base parameters, updates by layer, and networks."""

    names: frozenset[str] = frozenset()
    updates: Mapping[str, UpdateProducts] = field(default_factory=dict)
    networks: Mapping[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """Products of a hypernetwork's networks, in order, by side (k or v) and width."""


def trained_of(parameters: Mapping[str, Shape]) -> TrainedParameters:
    """Sort the trained parameters of a model with its adapter into base parameters and the products of updates."""
    factors: dict[str, dict[str, Shape]] = {}
    networks: dict[str, list[Shape]] = {}
    names = set()
    for name, shape in parameters.items():
        if NETWORK.search(name):
            networks.setdefault(name.partition(".network.")[0], []).extend([shape] if len(shape) == 2 else [])
        elif match := FACTOR.search(name):
            factors.setdefault(name[: match.start()], {})[match[1]] = (shape[0], math.prod(shape[1:]))
        else:
            names.add(name)
    updates = {layer: _update(found) for layer, found in factors.items()}
    products = {(layer[-1], found[0][1]): tuple(map(math.prod, found)) for layer, found in networks.items()}
    return TrainedParameters(frozenset(names), updates, products)


def _update(factors: Mapping[str, Shape]) -> UpdateProducts:
    """The update that has factors of these shapes."""
    if "lora_A" in factors:
        (rank, inputs), (outputs, _) = factors["lora_A"], factors["lora_B"]
        norms = rank * (outputs * inputs + rank * inputs + rank * outputs) if "magnitude" in factors else 0
        return UpdateProducts((rank * inputs, rank * outputs), constant=(norms, 0))
    if "oft_triangle" in factors:
        count, numbers = factors["oft_triangle"]
        side = (1 + math.isqrt(1 + 8 * numbers)) // 2  # of a matrix with this many entries above its diagonal
        return UpdateProducts((count * side**2,), constant=(0, count * side**3))
    if "hada_w1_a" in factors:  # a low-rank update whose rank is the product of both ranks
        (outputs, rank), (_, inputs) = factors["hada_w1_a"], factors["hada_w1_b"]
        other = factors["hada_w2_b"][0]
        return UpdateProducts((rank * other * inputs, rank * other * outputs))
    left, right = factors.get("lokr_w1") or (factors["lokr_w1_a"][0], factors["lokr_w1_b"][1])  # LoKr
    products: tuple[int, ...]
    if "lokr_w2" in factors:
        below, beyond = factors["lokr_w2"]
        first = right * below <= left * beyond
        whole = below * beyond * (right if first else left)
        products = (whole, left * right * below) if first else (left * right * beyond, whole)
    else:
        (below, rank), (_, beyond) = factors["lokr_w2_a"], factors["lokr_w2_b"]
        products = right * beyond * rank, left * right * rank, left * below * rank
    return UpdateProducts(products, sum(products[:-1]))


class Count:
    """Accumulates operations. A boolean stands for a tensor: whether it carries a gradient."""

    def __init__(self, shapes: Mapping[str, Shape], trained: TrainedParameters):
        self.shapes, self.trained, self.flops = shapes, trained, Flops()

    def linear(self, name: str, rows: int, grad: bool) -> bool:
        """y = x W^T + bias, and the products of its update, such as LoRA's y += (x A^T) B^T."""
        shape = self.shapes[f"{name}.weight"]
        outputs, inputs = shape[0], math.prod(shape[1:])
        product = 2 * rows * outputs * inputs
        trains = self.trains(f"{name}.weight")
        network = self.trained.networks.get((name[-1], inputs), ()) if name.endswith((".to_k", ".to_v")) else ()
        grad = self._trained_products(network, rows, grad)
        self.flops.forward += product
        self.flops.backward += product * (grad + trains)
        update = self.trained.updates.get(name, UpdateProducts(()))
        self.flops.recomputed += 2 * rows * update.recomputed
        self.flops.forward += 2 * update.constant[0]
        self.flops.backward += 2 * update.constant[1]
        updated = self._trained_products(update.products, rows, grad)
        return updated or trains or self.trains(f"{name}.bias")

    def _trained_products(self, products: Sequence[int], rows: int, grad: bool) -> bool:
        """The products of an update, or of a hypernetwork before a projection to keys or values."""
        for number, product in enumerate(products):
            self.flops.forward += 2 * rows * product
            self.flops.backward += 2 * rows * product * (2 if number else 1 + grad)
        return grad or bool(products)

    def chain(self, names: list[str], rows: int, grad: bool) -> bool:
        """A sequence of linear layers."""
        for name in names:
            grad = self.linear(name, rows, grad)
        return grad

    def attention(self, batch: int, tokens: tuple[int, int], width: int, grads: tuple[bool, bool, bool]) -> bool:
        """softmax(q k^T) v of this many queries, and keys and values; ``grads``: whether q, k and v carry gradients."""
        product = 2 * batch * tokens[0] * tokens[1] * width
        query, key, value = grads
        self.flops.forward += 2 * product
        # v, q and k take one product each, and the scores that q and k share take another.
        self.flops.backward += product * (query + key + value + (query or key))
        return any(grads)

    def norm(self, name: str, grad: bool) -> bool:
        """A norm with weight and bias, which adds no products, but may be trained."""
        return grad or self.trains(f"{name}.weight") or self.trains(f"{name}.bias")

    def trains(self, name: str) -> bool:
        """Whether a base parameter is trained."""
        return name in self.trained.names
