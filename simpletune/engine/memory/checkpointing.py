"""Gradient checkpointing by block (arXiv:1604.06174): store a block's inputs, recompute its activations.

diffusers' own switch is all or nothing, and leaves no place for the contexts that a block's two passes need (offloaded
weights, inputs from host memory), so this module wraps the blocks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from simpletune.engine.memory import accounting
from simpletune.engine.memory.recompute import recompute
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from simpletune.engine.memory.block_offload import BlockOffload
    from simpletune.engine.memory.feed_forward import FeedForwards
    from simpletune.engine.memory.offload_inputs import CheckpointInputOffload
    from simpletune.engine.memory.selective_checkpointing import SavedAttention


@dataclass(frozen=True)
class Parts:
    """How the parts of blocks are recomputed."""

    keep_attention: int = 0
    """How many of the checkpointed blocks keep what attention returned: the last of them, whose backward passes come
    first and free it before gradients pile up."""
    feed_forward: Literal["checkpointed", "all", "none"] = "none"
    """The blocks that recompute their feed-forward networks separately."""
    tile: int | None = None
    """The most tokens that pass through a feed-forward network at once; None: all."""
    last: bool = False
    """Whether blocks end with their feed-forward networks (see ``FeedForwards``)."""


WHOLE = Parts()


def set_passes(
    blocks: Sequence[nn.Module],
    checkpointed: int,
    inputs: CheckpointInputOffload | None = None,
    weights: BlockOffload | None = None,
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
        weights: brings their weights to the device; None: these are always there.
        parts: which parts of a block are recomputed separately, or not at all.
    """
    for index, block in enumerate(blocks):
        first = checkpointed - parts.keep_attention
        attention = networks = None
        if first <= index < checkpointed:
            from simpletune.engine.memory.selective_checkpointing import SavedAttention

            attention = SavedAttention(block, inputs)
        if parts.feed_forward == "all" or (parts.feed_forward == "checkpointed" and index < checkpointed):
            from simpletune.engine.memory.feed_forward import FeedForwards

            networks = FeedForwards(block, parts.tile, parts.last, draws_random_numbers(block))
        if index < checkpointed or weights is not None:
            block.forward = _passes(block, index, index < checkpointed, inputs, weights, attention, networks)


def _passes(
    block: nn.Module,
    index: int,
    checkpointed: bool,
    inputs: CheckpointInputOffload | None,
    weights: BlockOffload | None,
    attention: SavedAttention | None,
    networks: FeedForwards | None,
) -> Callable[..., object]:
    """Return the wrapped forward pass of one block; see ``set_passes``."""
    original = block.forward
    random = draws_random_numbers(block)

    def forward(*args: object, **kwargs: object) -> object:
        given = (*args, *kwargs.values())
        first: list[AbstractContextManager[object]] = [] if weights is None else [weights.forward(index)]
        if not (checkpointed and has_backward_pass(block, given)):
            with _enter_all(first):
                return original(*args, **kwargs)
        second: list[AbstractContextManager[object]] = [accounting.recomputing()]
        if weights is not None:
            second.append(weights.recomputation(index))
        if attention is not None:
            keeping, returning = attention.contexts()
            first.append(keeping)
            second.append(returning)
        if networks is not None:
            second.append(networks.recomputation(given))
        pair = _enter_all(first), _enter_all(second)
        count, names = len(args), tuple(kwargs)  # not the inputs themselves, which would stay in memory

        def run(*own: object) -> object:
            return original(*own[:count], **dict(zip(names, own[count:], strict=True)))

        with nullcontext() if inputs is None else inputs.offloading():
            return recompute(run, given, *pair, random)

    return forward


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    """Enter contexts in order."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def has_backward_pass(block: nn.Module, inputs: Sequence[object]) -> bool:
    """Return whether a block's forward pass will have a backward pass."""
    # A U-Net's first blocks have no LoRA and need none; an offloaded input of one would never be fetched, and its host
    # memory never reused.
    if not torch.is_grad_enabled():
        return False
    given = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
    return given or any(parameter.requires_grad for parameter in block.parameters())


def draws_random_numbers(block: nn.Module) -> bool:
    """Return whether a block's forward pass draws random numbers."""
    # LoRA dropout does, the base's dropout of 0 does not
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in block.modules())


def find_fewest(blocks: int, peak_bytes: Callable[[int], int], budget_bytes: int) -> int | None:
    """Find the smallest number of checkpointed blocks whose peak fits a budget; None if no number does.

    From 0 to blocks - 1 the peak falls almost linearly with every checkpointed block, so the search interpolates
    between the nearest known peaks. All blocks are tried last: the last block's backward pass follows its forward pass
    immediately, so checkpointing it hardly ever lowers the peak.

    Args:
        peak_bytes: computes the peak for a number of checkpointed blocks; called about four times, and at most twice as
            often as bisection would.
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


def budget_error(budget_bytes: int, least_bytes: int) -> UserError:
    """Return the error for a budget, ``memory.budget_gib``, that the lowest peak exceeds."""
    enough = -(-least_bytes * 100 // 2**30) / 100  # GiB, rounded up to two decimals
    return UserError(
        f"memory.budget_gib: {budget_bytes / 2**30:.3g} GiB is too little: with every block checkpointed the peak "
        f"is {least_bytes / 2**20:.0f} MiB. Raise it to {enough:.2f}, or use another lever: "
        "memory.resident_blocks, a smaller precision.weights, train.batch_size or data.resolution"
    )
