"""Which layers make a model's modulations, as a fact of its architecture. Imports no torch.

Shapes: n samples, p pooled width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Modulation:
    """One module embeds the timestep, or the timestep and the pooled prompt, and linear layers, in each block or shared
    by all, map the embedding to shifts, scales and gates (adaLN, arXiv:2212.09748, section 3.2). Both depend on nothing
    else, so they can be computed ahead (``memory.modulation`` plan).

    Args:
        embed: the name of the module that embeds. It lies outside of the units, and a forward pass calls it once.
        layers: patterns of the linear layers' names; the value names the SiLU before them, a neighbour in the same
            parent; None: there is none.
        inputs: the arguments of ``embed``, from the timesteps that ``Family.predict`` receives [n], the pooled prompts
            [n, p] (None unless ``reads_pooled``) and the type of the activations.
        reads_pooled: whether modulations depend on the pooled prompt, too.
    """

    embed: str
    layers: Mapping[str, str | None]
    inputs: Callable[[Tensor, Tensor | None, torch.dtype], tuple[object, ...]]
    reads_pooled: bool

    def has(self, module: str) -> bool:
        """Return whether a module is one of the linear layers."""
        return any(re.search(pattern, module) for pattern in self.layers)

    def activation(self, layer: str) -> str | None:
        """Return the name of the activation before one of the linear layers, if there is one."""
        beside = next(own for pattern, own in self.layers.items() if re.search(pattern, layer))
        return None if beside is None else f"{layer.rpartition('.')[0]}.{beside}"

    def serves(self, module: str) -> bool:
        """Return whether a module serves only to compute modulations."""
        return self.has(module) or f"{module}.".startswith(f"{self.embed}.")
