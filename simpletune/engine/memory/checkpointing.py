"""Gradient checkpointing by block (arXiv:1604.06174): store a block's inputs, recompute its activations.

diffusers' own switch is all or nothing, and leaves no place for the contexts that a block's two passes need (offloaded
weights, inputs from host memory), so this module wraps the blocks itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simpletune.engine.memory import accounting
from simpletune.engine.memory.feed_forward import FeedForwards
from simpletune.engine.memory.offload_inputs import CheckpointInputOffload
from simpletune.engine.memory.selective_checkpointing import SavedAttention
from simpletune.system.options import UserError

MIB = 2**20
Context = AbstractContextManager[object]


class BlockPasses(Protocol):
    """Provides contexts for the passes of a block."""

    def forward(self, index: int) -> Context:
        """The context of its forward pass."""

    def recomputation(self, index: int) -> Context:
        """The context of its recomputation at the start of its backward pass."""


class PlainPasses:
    """Passes of blocks whose weights are always on the device."""

    def forward(self, index: int) -> Context:
        """An empty context."""
        return nullcontext()

    def recomputation(self, index: int) -> Context:
        """An empty context."""
        return nullcontext()


@dataclass(frozen=True)
class Parts:
    """How the parts of blocks are recomputed.

    Args:
        keep_attention: how many of the checkpointed blocks keep what attention returned: the last of them, whose
            backward passes come first and free it before gradients pile up.
        feed_forward: the blocks that recompute their feed-forward networks separately: the checkpointed ones, all, or
            none.
        tile: the most tokens that pass through a feed-forward network at once; None: all.
        last: whether blocks end with their feed-forward networks (see ``FeedForwards``).
    """

    keep_attention: int = 0
    feed_forward: Literal["checkpointed", "all", "none"] = "none"
    tile: int | None = None
    last: bool = False


WHOLE = Parts()


def set_passes(
    blocks: Sequence[nn.Module],
    checkpointed: int,
    inputs: CheckpointInputOffload | None = None,
    around: BlockPasses | None = None,
    parts: Parts = WHOLE,
) -> None:
    """Wrap the blocks' forward passes; checkpoint the first ``checkpointed`` blocks if gradients are enabled.

    Checkpointing the first blocks is best: the backward pass reaches them last, when the other blocks have freed their
    activations, so the recomputed activations, one block's at a time, add only to stored inputs. At the end of the
    model they would add to everything stored, which costs one block's activations more in the same time.

    Args:
        blocks: all blocks, in the order of the forward pass; changed in place.
        checkpointed: how many blocks to checkpoint.
        inputs: moves their inputs to host memory.
        around: provides contexts for every block's passes.
        parts: which parts of a block are recomputed separately, or not at all.
    """
    for index, block in enumerate(blocks):
        first = checkpointed - parts.keep_attention
        attention = SavedAttention(block, inputs) if first <= index < checkpointed else None
        networks = None
        if parts.feed_forward == "all" or (parts.feed_forward == "checkpointed" and index < checkpointed):
            networks = FeedForwards(block, parts.tile, parts.last, draws_random_numbers(block))
        contexts = _Contexts(index, PlainPasses() if around is None else around, attention, networks)
        block.forward = _passes(block, index < checkpointed, inputs, contexts)


@dataclass(frozen=True)
class _Contexts:
    """The contexts of one block's passes.

    Args:
        index: the block's index.
        around: its weights.
        attention: what it keeps of attention.
        networks: the feed-forward networks that it recomputes separately.
    """

    index: int
    around: BlockPasses
    attention: SavedAttention | None
    networks: FeedForwards | None

    def of_checkpoint(self, inputs: Sequence[object]) -> tuple[Context, Context]:
        """The contexts of a checkpointed forward pass and of its recomputation.

        Args:
            inputs: the block's inputs.
        """
        first, second = self.around.forward(self.index), self.around.recomputation(self.index)
        if self.attention is not None:
            keeping, returning = self.attention.contexts()
            first, second = _both(first, keeping), _both(second, returning)
        if self.networks is not None:
            second = _both(second, self.networks.recomputation(inputs))
        return first, _both(accounting.recomputing(), second)


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


def _passes(
    block: nn.Module, checkpointed: bool, inputs: CheckpointInputOffload | None, contexts: _Contexts
) -> Callable[..., object]:
    """The wrapped forward pass of one block."""
    original = block.forward
    signature = inspect.signature(original)
    random = draws_random_numbers(block)

    def forward(*args: object, **kwargs: object) -> object:
        given = (*args, *kwargs.values())
        if not (checkpointed and has_backward_pass(block, given)):
            with contexts.around.forward(contexts.index):
                return original(*args, **kwargs)
        pair = contexts.of_checkpoint(given)
        bound = signature.bind(*args, **kwargs)  # positional, because the offload's hooks see only those
        with nullcontext() if inputs is None else inputs.offloading():
            return checkpoint(
                original,
                *bound.args,
                **bound.kwargs,
                use_reentrant=False,
                preserve_rng_state=random,
                context_fn=lambda: pair,
            )

    return forward


def has_backward_pass(block: nn.Module, inputs: Sequence[object]) -> bool:
    """Whether a block's forward pass will have a backward pass: a U-Net's first blocks have no LoRA and need none.

    An offloaded input of a block without one would never be fetched, and its host memory never reused.
    """
    if not torch.is_grad_enabled():
        return False
    given = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
    return given or any(parameter.requires_grad for parameter in block.parameters())


def draws_random_numbers(block: nn.Module) -> bool:
    """Whether a block's forward pass draws random numbers: LoRA dropout does, the base's dropout of 0 does not."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in block.modules())


def fewest_that_fit(blocks: int, peak_bytes: Callable[[int], int], budget_bytes: int) -> int | None:
    """The smallest number of checkpointed blocks whose peak fits a budget; None if no number does.

    From 0 to blocks - 1 the peak falls almost linearly with every checkpointed block, so the search interpolates
    between the nearest known peaks. All blocks are tried last: the last block's backward pass follows its forward pass
    immediately, so checkpointing it hardly ever lowers the peak.

    Args:
        blocks: the number of blocks.
        peak_bytes: computes the peak for a number of checkpointed blocks; called about four times, and at most twice as
            often as bisection would.
        budget_bytes: the largest acceptable peak.
    """
    if blocks < 1:
        raise ValueError(f"{blocks} blocks: there must be at least one")
    low, exceeding = 0, peak_bytes(0)
    if exceeding <= budget_bytes:
        return 0
    high, fitting = blocks - 1, peak_bytes(blocks - 1)
    if fitting > budget_bytes:
        return blocks if peak_bytes(blocks) <= budget_bytes else None
    straight = True
    while high - low > 1:  # low exceeds, high fits
        place = low + -(-(exceeding - budget_bytes) * (high - low) // max(1, exceeding - fitting))
        asked = min(max(place, low + 1), high - 1) if straight else (low + high) // 2
        found, before = peak_bytes(asked), high - low
        if found <= budget_bytes:
            high, fitting = asked, found
        else:
            low, exceeding = asked, found
        straight = not straight or 2 * (high - low) <= before  # alternate with bisection when interpolation is slow
    return high


def too_little(budget_bytes: int, least_bytes: int) -> UserError:
    """The error for a budget that the lowest peak exceeds.

    Args:
        budget_bytes: ``memory.budget_gib``.
        least_bytes: the lowest peak.
    """
    return UserError(
        f"memory.budget_gib: {budget_bytes / 2**30:.3g} GiB is too little: with every block checkpointed the peak "
        f"is {least_bytes / MIB:.0f} MiB. Raise it to {_up(least_bytes):.2f}, or use another lever: "
        "memory.resident_blocks, a smaller precision.weights, train.batch_size or data.resolution"
    )


def _up(count: int) -> float:
    """Bytes in GiB, rounded up to two decimals."""
    return -(-count * 100 // 2**30) / 100
