"""Count the floating-point operations of a training step on the meta device, where nothing is computed.

Counts only matrix products and convolutions, which are nearly all of the arithmetic; a multiply-add is two operations.
torch counts those of the trained model's forward and backward pass, and autograd decides which the backward pass needs;
the products of an adapter's updates, which that model does not have, are added by the shapes of their factors.
Recomputation by checkpointing is counted separately, because model FLOPs utilisation excludes it (arXiv:2204.02311,
appendix B). Excludes the recomputation of scores in fused attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

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
    """Return the update that has factors of these shapes."""
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


def count_flops(
    model: nn.Module, predict: Callable[[], Tensor], trained: TrainedParameters, recomputed: Collection[str] = ()
) -> Flops:
    """Count one micro-batch. Changes the model: it gets hooks, and its trained parameters carry gradients.

    Args:
        model: on the meta device, without adapter.
        predict: runs it.
        trained: the trained parameters.
        recomputed: the modules that checkpointing recomputes, if the backward pass reaches them.
    """
    count, modules = _Count(), dict(model.named_modules())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained.names)
    for name, layer in modules.items():
        if name.endswith((".to_k", ".to_v")) and trained.networks:
            products = trained.networks.get((name[-1], layer.weight.shape[1]), ())
            layer.register_forward_pre_hook(count.network(products))
    for name in trained.updates.keys() & modules.keys():
        modules[name].register_forward_hook(count.update(trained.updates[name]))
    for name in recomputed:
        count.watch(modules[name])
    flops = count.flops
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), count:  # fused attention would repeat its scores
        prediction, forward = predict(), count.products
        if prediction.requires_grad:
            prediction.sum().backward()
    flops.forward += forward
    flops.backward += count.products - forward
    return flops


class _Count(TorchDispatchMode):
    """Sees every operation. ``products``: of the model; ``flops``: of what it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.flops = 0, Flops()

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if (formula := flop_registry.get(op._overloadpacket)) is not None:
            self.products += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def network(self, products: Sequence[int]) -> Callable[..., Any]:
        """Return a hook before a projection to keys or values, for a hypernetwork's network."""

        def before(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = given
            self._add(products, x.numel() // x.shape[-1], x.requires_grad)
            return (_with_gradient(x) if products else x), *others

        return before

    def update(self, update: UpdateProducts) -> Callable[..., Any]:
        """Return a hook after a layer, for its update."""

        def after(module: Any, given: tuple[Any, ...], y: Tensor) -> Tensor:
            rows = y.numel() // module.weight.shape[0]
            self._add(update.products, rows, given[0].requires_grad)
            self.flops.recomputed += 2 * rows * update.recomputed
            self.flops.forward += 2 * update.constant[0]
            self.flops.backward += 2 * update.constant[1]
            return _with_gradient(y)

        return after

    def watch(self, unit: nn.Module) -> None:
        """Count a unit's forward pass a second time if its output carries a gradient."""
        begun: list[int] = []

        def so_far() -> int:
            return self.products + self.flops.forward

        def after(module: nn.Module, given: Any, output: Any) -> None:
            results, before = output if isinstance(output, tuple) else (output,), begun.pop()
            if any(isinstance(result, Tensor) and result.requires_grad for result in results):
                self.flops.recomputed += so_far() - before

        unit.register_forward_pre_hook(lambda *_: begun.append(so_far()))
        unit.register_forward_hook(after)

    def _add(self, products: Sequence[int], rows: int, grad: bool) -> None:
        """Add a chain of products, as multiply-adds a row. ``grad``: whether what it reads carries a gradient."""
        for number, product in enumerate(products):
            self.flops.forward += 2 * rows * product
            self.flops.backward += 2 * rows * product * (2 if number else 1 + grad)


def _with_gradient(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_().clone()
