"""Gradient checkpointing block by block (arXiv:1604.06174): inputs are kept, activations are computed again.

Ours over the model's blocks, because the model's own switch is all or nothing, and because what a block's two passes
need (its streamed weights, its inputs from the host) has to stand around exactly those passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from simpletune.memory.offload_inputs import CheckpointInputOffload
from simpletune.options import UserError

MIB = 2**20
Context = AbstractContextManager[object]


class Passes(Protocol):
    """What stands around the passes of a block."""

    def forward(self, index: int) -> Context:
        """Around its forward pass."""

    def recomputation(self, index: int) -> Context:
        """Around the forward pass that its backward pass starts with."""


class PlainPasses:
    """Weights are where they are needed."""

    def forward(self, index: int) -> Context:
        """Nothing."""
        return nullcontext()

    def recomputation(self, index: int) -> Context:
        """Nothing."""
        return nullcontext()


def set_passes(
    blocks: Sequence[nn.Module],
    checkpointed: int,
    inputs: CheckpointInputOffload | None = None,
    around: Passes | None = None,
) -> None:
    """Replace the blocks' forward: the first ``checkpointed`` of them keep their inputs only, when gradients are due.

    The first, because the backward pass comes to them last: by then the others have freed their activations, so those
    that are computed again, one block's at a time, come on top of inputs only. Among the last they would come on top
    of all that is kept, and cost one block's activations more for the same time.

    Args:
        blocks: in the order of the forward pass; changed in place.
        checkpointed: how many.
        inputs: keeps their inputs on the host.
        around: stands around every block's passes.
    """
    for index, block in enumerate(blocks):
        around_it = PlainPasses() if around is None else around
        block.forward = _passes(block, index, index < checkpointed, inputs, around_it)


def _passes(
    block: nn.Module, index: int, checkpointed: bool, inputs: CheckpointInputOffload | None, around: Passes
) -> Callable[..., object]:
    """The forward pass of one block."""
    original = block.forward
    signature = inspect.signature(original)
    random = draws_random_numbers(block)

    def forward(*args: object, **kwargs: object) -> object:
        if not (checkpointed and torch.is_grad_enabled()):
            with around.forward(index):
                return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)  # by position: only those inputs are seen by the offload's hooks
        with nullcontext() if inputs is None else inputs.offloading():
            return checkpoint(
                original,
                *bound.args,
                **bound.kwargs,
                use_reentrant=False,
                preserve_rng_state=random,
                context_fn=lambda: (around.forward(index), around.recomputation(index)),
            )

    return forward


def draws_random_numbers(block: nn.Module) -> bool:
    """Whether a block's forward pass draws random numbers: a LoRA's dropout does, the base's of p = 0 does not."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in block.modules())


def fewest_that_fit(blocks: int, peak_bytes: Callable[[int], int], budget_bytes: int) -> int | None:
    """The smallest number of checkpointed blocks whose peak fits a budget; None: not even all of them do.

    From 0 to blocks - 1 a peak falls with every checkpointed block, by about as much each: the number is looked for
    where a straight line between the nearest known ones meets the budget, and beside it. All blocks are tried last: the
    last block's backward pass follows its forward pass at once, so that checkpointing it hardly ever lowers the peak.

    Args:
        blocks: how many there are.
        peak_bytes: the peak with so many of them checkpointed; asked four times or so, twice as often as bisection
            would at the most.
        budget_bytes: what the peak must not exceed.
    """
    if blocks < 1:
        raise ValueError(f"{blocks} blocks: there must be one at least")
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
        straight = not straight or 2 * (high - low) <= before  # a line that leads nowhere takes turns with halves
    return high


def fewest_checkpointed(blocks: int, peak_bytes: Callable[[int], int], budget_bytes: int) -> int:
    """As ``fewest_that_fit``.

    Raises:
        UserError: it does not fit with all blocks checkpointed.
    """
    peak = cache(peak_bytes)
    found = fewest_that_fit(blocks, peak, budget_bytes)
    if found is not None:
        return found
    least = min(peak(blocks - 1), peak(blocks))
    raise UserError(
        f"memory.budget_gib: {budget_bytes / 2**30:.3g} GiB is too little: with every block checkpointed the peak "
        f"is {least / MIB:.0f} MiB. Raise it to {_up(least):.2f}, or take another lever: "
        "memory.resident_blocks, a smaller precision.weights, train.batch_size or data.resolution"
    )


def _up(count: int) -> float:
    """GiB with two decimals, rounded up."""
    return -(-count * 100 // 2**30) / 100
