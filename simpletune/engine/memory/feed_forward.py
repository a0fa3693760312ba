"""Recompute feed-forward networks separately from their blocks, whole or in tiles of tokens.

A feed-forward network's hidden features are four or eight times as wide as its input, and its products are half of a
block's or more. Checkpointed separately, it keeps its input; when the backward pass reaches it, it recomputes only what
its own gradients need, which excludes its second product unless that has an update of its own.

Inside a checkpointed block, the block's recomputation need not run the network at all if nothing else that the backward
pass needs depends on its output. That holds if only sums, and products with modulations that carry no gradient, follow
the network in the block: then half of the network's recomputation is saved, and its hidden features are never in memory
together with the activations of the whole block.

Without tiles this is exact. With tiles, each token's products are the same sums, but a kernel may add them in another
order for fewer rows, and gradients of the network's weights are sums over tiles.

Shapes: n rows (samples x tokens), d width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from simpletune.engine.memory import accounting
from simpletune.engine.memory.fake import replace_attribute
from simpletune.engine.memory.recompute import recompute
from simpletune.engine.memory.selective_checkpointing import attentions
from simpletune.engine.tensors import all_tensors, is_wrapper, plain_tensors

CONDITIONING = 2
"""The most dimensions of a conditioning [b, d] among a block's inputs; tokens have more."""


class FeedForwards:
    """Separate checkpoints of the feed-forward networks of one block.

    Args:
        block: the block, whose networks are changed in place.
        rows: the most tokens of a tile; None: all tokens at once.
        last: whether only sums and products with modulations follow the networks in the block.
        random: whether the block draws random numbers.
    """

    def __init__(self, block: nn.Module, rows: int | None, last: bool, random: bool):
        self._rows = rows
        self._random = random
        self._omits = False
        networks = feed_forwards(block)
        self._may_omit = last and not random and not _trains_modulation(block, networks)
        for network in networks:
            network.forward = self._alone(network, network.forward)

    def recomputation(self, inputs: Sequence[object]) -> AbstractContextManager[None]:
        """Return the context of the block's recomputation, which omits the networks where nothing needs their outputs.
        It does not keep the block's inputs."""
        conditionings = [x for x in inputs if isinstance(x, Tensor) and x.dim() <= CONDITIONING]
        return replace_attribute(self, "_omits", self._may_omit and not any(x.requires_grad for x in conditionings))

    def _alone(self, network: nn.Module, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]

        def run(part: Tensor) -> Tensor:
            with keep_weights_by_reference(network):
                return plain(part)

        def omitted(part: Tensor) -> Tensor:
            return part  # nobody reads the output; the checkpoint keeps its input all the same

        @functools.wraps(plain)
        def forward(x: Tensor) -> Tensor:  # [..., d]
            if not torch.is_grad_enabled() or not (x.requires_grad or trained):
                return plain(x)
            omits = self._omits and x.requires_grad
            outputs: list[Tensor] = [
                recompute(omitted if omits else run, (part,), None, accounting.recomputing(), self._random)
                for part in tiles(x, self._rows)
            ]
            if omits:
                return x
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1).view(x.shape)

        return forward


FEED_FORWARDS = (
    "diffusers.models.attention.FeedForward",  # of SD3, U-Nets, Qwen-Image
    "diffusers.models.transformers.transformer_flux2.Flux2FeedForward",
    "diffusers.models.transformers.transformer_z_image.FeedForward",
)
"""Classes of feed-forward networks [..., d] -> [..., d] that work on each token by itself. By name: importing a model's
module for another model takes time."""


def feed_forwards(block: nn.Module) -> list[nn.Module]:
    """Return the feed-forward networks of a block: those of ``FEED_FORWARDS``. A network of another class stays part of
    its block's recomputation."""

    def known(module: nn.Module) -> bool:
        return any(f"{each.__module__}.{each.__qualname__}" in FEED_FORWARDS for each in type(module).__mro__)

    return list(filter(known, block.modules()))


@contextmanager
def keep_weights_by_reference(network: nn.Module) -> Iterator[None]:
    """Let a checkpoint of a network keep references to the network's own tensors, and recompute everything else.

    A frozen quantised layer saves its weight when its product is done. If the weight were among what the checkpoint
    recomputes, the last product would be computed for nothing else. References follow weights that are offloaded: the
    block's recomputation, which brings them, has begun by then, because its last sum saves what only that computes.
    """
    below = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert below is not None, "not within a checkpoint"
    keep, fetch = below
    own = {_place(plain): plain for tensor in all_tensors(network) for plain in plain_tensors(tensor)}

    def pack(tensor: Tensor) -> object:
        found = None if is_wrapper(type(tensor)) else own.get(_place(tensor))
        return keep(tensor) if found is None else _Own(found)

    def unpack(kept: object) -> Tensor:
        found: Tensor = kept.tensor if isinstance(kept, _Own) else fetch(kept)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True, eq=False)
class _Own:
    """One of a network's own tensors."""

    tensor: Tensor


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return where and how a tensor lies in memory."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def tiles(x: Tensor, rows: int | None) -> Sequence[Tensor]:  # [..., d] -> [1, n, d]
    """Split tokens into views of about equal size, of at most ``rows`` tokens; x itself if it is one tile."""
    count = x.numel() // x.shape[-1]
    if rows is None or count <= rows:
        return (x,)
    return x.reshape(1, count, x.shape[-1]).split(-(-count // -(-count // rows)), dim=1)


def _trains_modulation(block: nn.Module, networks: Sequence[nn.Module]) -> bool:
    """Return whether a block trains anything outside of attention and feed-forward networks."""
    known = {id(parameter) for module in [*networks, *attentions(block)] for parameter in module.parameters()}
    return any(parameter.requires_grad and id(parameter) not in known for parameter in block.parameters())
