"""Count the floating-point operations of a training step from shapes alone.

Counts only matrix products and convolutions, which are nearly all of the arithmetic; a multiply-add is two operations.
Covers the trained model's forward pass, including attention, and the part of its backward pass that training needs: one
product for each trained weight, and one for each input that carries a gradient. Recomputation by checkpointing is
counted separately, because model FLOPs utilisation excludes it (arXiv:2204.02311, appendix B). Excludes the
recomputation of scores in fused attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from simpletune.models.model_config import Shape

LORA_A, LORA_B = ".lora_A.", ".lora_B."


@dataclass
class Flops:
    """Floating-point operations of one micro-batch."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    """Operations recomputed by checkpointing."""

    @property
    def model(self) -> int:
        """Operations without recomputation."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Trained:
    """The trained parameters: names of base parameters, and LoRA ranks by module."""

    names: frozenset[str] = frozenset()
    ranks: Mapping[str, int] | None = None


def trained_of(parameters: Mapping[str, Shape]) -> Trained:
    """Sort the trained parameters of a model with its adapter into base parameters and LoRA ranks."""
    ranks = {name.split(LORA_A)[0]: shape[0] for name, shape in parameters.items() if LORA_A in name}
    return Trained(frozenset(name for name in parameters if LORA_A not in name and LORA_B not in name), ranks)


class Count:
    """Accumulates operations. A boolean stands for a tensor: whether it carries a gradient."""

    def __init__(self, shapes: Mapping[str, Shape], trained: Trained):
        self.shapes, self.trained, self.flops = shapes, trained, Flops()

    def linear(self, name: str, rows: int, grad: bool) -> bool:
        """y = x W^T + bias, and LoRA's y += (x A^T) B^T."""
        shape = self.shapes[f"{name}.weight"]
        outputs, inputs = shape[0], math.prod(shape[1:])
        product = 2 * rows * outputs * inputs
        trains = self.trains(f"{name}.weight")
        self.flops.forward += product
        self.flops.backward += product * (grad + trains)
        rank = (self.trained.ranks or {}).get(name)
        if rank is not None:
            down, up = 2 * rows * inputs * rank, 2 * rows * rank * outputs
            self.flops.forward += down + up
            self.flops.backward += 2 * up + down * (1 + grad)
        return grad or trains or self.trains(f"{name}.bias") or rank is not None

    def chain(self, names: list[str], rows: int, grad: bool) -> bool:
        """A sequence of linear layers."""
        for name in names:
            grad = self.linear(name, rows, grad)
        return grad

    def attention(self, batch: int, tokens: int, width: int, grad: bool) -> bool:
        """softmax(q k^T) v: two products forward, four backward."""
        return self.cross_attention(batch, (tokens, tokens), width, (grad, grad, grad))

    def cross_attention(self, batch: int, tokens: tuple[int, int], width: int, grads: tuple[bool, bool, bool]) -> bool:
        """softmax(q k^T) v, of which only some carry gradients.

        Backward, v, q and k take a product each, and the scores that q and k share another one.

        Args:
            tokens: of queries, and of keys and values.
            grads: whether q, k and v carry gradients.
        """
        product = 2 * batch * tokens[0] * tokens[1] * width
        query, key, value = grads
        self.flops.forward += 2 * product
        self.flops.backward += product * (query + key + value + (query or key))
        return any(grads)

    def norm(self, name: str, grad: bool) -> bool:
        """A norm with weight and bias, which adds no products, but may be trained."""
        return grad or self.trains(f"{name}.weight") or self.trains(f"{name}.bias")

    def trains(self, name: str) -> bool:
        """Whether a base parameter is trained."""
        return name in self.trained.names
