"""Gradient checkpointing by block (arXiv:1604.06174): store a block's inputs, recompute its activations.

diffusers' own switch is all or nothing, and leaves no place for the contexts that a block's two passes need (streamed
weights, inputs from host memory), so this module wraps the blocks itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simpletune.memory.offload_inputs import CheckpointInputOffload
from simpletune.options import UserError

MIB = 2**20
Context = AbstractContextManager[object]


class Passes(Protocol):
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


def set_passes(
    blocks: Sequence[nn.Module],
    checkpointed: int,
    inputs: CheckpointInputOffload | None = None,
    around: Passes | None = None,
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
    """
    for index, block in enumerate(blocks):
        around_it = PlainPasses() if around is None else around
        block.forward = _passes(block, index, index < checkpointed, inputs, around_it)


def _passes(
    block: nn.Module, index: int, checkpointed: bool, inputs: CheckpointInputOffload | None, around: Passes
) -> Callable[..., object]:
    """The wrapped forward pass of one block."""
    original = block.forward
    signature = inspect.signature(original)
    random = draws_random_numbers(block)

    def forward(*args: object, **kwargs: object) -> object:
        if not (checkpointed and has_backward_pass(block, (*args, *kwargs.values()))):
            with around.forward(index):
                return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)  # positional, because the offload's hooks see only those
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


def has_backward_pass(block: nn.Module, inputs: Sequence[object]) -> bool:
    """Whether a forward pass of a block will have a backward pass: a U-Net's first ones have no LoRA and need none.

    Nothing is kept of the others anyway. An offloaded input that is never fetched would not free its host memory for
    reuse.
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


def fewest_checkpointed(blocks: int, peak_bytes: Callable[[int], int], budget_bytes: int) -> int:
    """Like ``fewest_that_fit``, but raises if nothing fits.

    Raises:
        UserError: the peak exceeds the budget even with all blocks checkpointed.
    """
    peak = cache(peak_bytes)
    found = fewest_that_fit(blocks, peak, budget_bytes)
    if found is not None:
        return found
    least = min(peak(blocks - 1), peak(blocks))
    raise UserError(
        f"memory.budget_gib: {budget_bytes / 2**30:.3g} GiB is too little: with every block checkpointed the peak "
        f"is {least / MIB:.0f} MiB. Raise it to {_up(least):.2f}, or use another lever: "
        "memory.resident_blocks, a smaller precision.weights, train.batch_size or data.resolution"
    )


def _up(count: int) -> float:
    """Bytes in GiB, rounded up to two decimals."""
    return -(-count * 100 // 2**30) / 100
