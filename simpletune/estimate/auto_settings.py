"""Settings that follow from the card's memory: ``train.batch_size: auto`` and ``memory.checkpointing: auto``.

``batch_size`` becomes the largest micro-batch that divides ``train.global_batch`` and fits.

``checkpointing`` becomes the fewest blocks that fit. Checkpointed blocks keep the output of attention, because nothing
else saves as much time per byte; if even checkpointing all blocks does not fit then, as few blocks as possible
recompute it. Feed-forward networks are recomputed separately where that saves time.

Predicted peaks are cached under ``<cache>/estimates/``: a second start asks for no prediction, and a different budget
or less free memory for at most one more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from simpletune.config.batches import AnyConfig, share_of_process, sizes_of, with_batch
from simpletune.config.check import can_recompute_feed_forward
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.checkpointing import budget_error, find_fewest
from simpletune.engine.memory.cuda_libraries import cublas_workspace
from simpletune.estimate.job_estimate import MIB, cache_file, largest_peak
from simpletune.estimate.planning import may_keep_attention
from simpletune.estimate.run_estimate import card_at_hand
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.shared.buckets import Size
from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import write_json
from simpletune.system.console import detail, say
from simpletune.system.gpus import Card
from simpletune.system.options import UserError, plural

ANY = (8, 9)  # any CUDA capability: these peaks leave out the libraries' workspaces
ALIKE = 2  # gradients of micro-batches add up in place: more of them in a step take no more memory


class RecomputeCounts(NamedTuple):
    """Number of checkpointed blocks, and of those among them that keep the output of attention."""

    checkpointed: int
    keeping: int = 0


def budget_of(config: TrainConfig, card: Card | torch.device | None, reserved: int, setting: str, instead: str) -> int:
    """Return the largest acceptable peak in bytes: ``memory.budget_gib``, or what a card has room for.

    Args:
        card: the card, of which other programs use ``reserved`` bytes, or the device to ask for both.
        setting: the setting that is auto.
        instead: what to do instead, for the message.

    Raises:
        UserError: there is neither a budget nor a card.
    """
    if config.memory.budget_gib is not None:
        return int(config.memory.budget_gib * 2**30)
    if isinstance(card, torch.device):
        if card.type != "cuda":
            raise UserError(
                f"{setting}: auto depends on the card's free memory, and this run is on the CPU. Set "
                f"memory.budget_gib too, or {instead}"
            )
        card, reserved = card_at_hand(card)
    if card is None:
        raise UserError(
            f"{setting}: auto depends on the card's memory, and there is no card here. Name one "
            f"(estimate CONFIG --device L4), set memory.budget_gib, or {instead}"
        )
    return largest_peak(card, reserved) - cublas_workspace(card.capability, deterministic=config.speed.deterministic)


def choose_batch(
    config: AnyConfig,
    size: Size,
    processes: int = 1,
    card: Card | torch.device | None = None,
    reserved: int = 0,
) -> AnyConfig:
    """Replace ``batch_size: auto`` by a number and print it; return any other configuration unchanged.

    If nothing fits, the number is 1; the prediction of the whole job then reports the misfit.

    Args:
        config: configuration with demo names and ``memory.modulation`` resolved.
        size: width and height in pixels of the largest bucket.
        processes: number of processes.
        card: see ``budget_of``; likewise ``reserved``.

    Raises:
        UserError: there is neither a budget nor a card.
    """
    train = config.train
    if train.batch_size != "auto":
        return config
    assert train.global_batch is not None, "a rule"
    budget = budget_of(config, card, reserved, "train.batch_size", "set a number")
    sizes = sizes_of(train.global_batch, processes)
    low, high = 0, len(sizes) - 1  # range of indices of the largest that fits; the smallest need not fit
    while low < high:
        middle = (low + high + 1) // 2
        fits = peak_of(share_of_process(with_batch(config, sizes[middle]), processes), size) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    chosen = with_batch(config, sizes[low])
    peak = peak_of(share_of_process(chosen, processes), size)
    micros = plural(chosen.train.accumulation, "micro-batch", "micro-batches")
    say(
        f"batch   auto: {micros} of {plural(sizes[low], 'picture')} a step, predicted peak {peak / MIB:,.0f} of "
        f"{max(0, budget) / MIB:,.0f} MiB"
    )
    return chosen


def peak_of(config: TrainConfig, size: Size) -> int:
    """Predict the peak of the training step in bytes, without the libraries' workspaces. With ``checkpointing: auto``,
    all blocks are checkpointed."""
    memory = config.memory.model_copy(update={"budget_gib": None})
    if memory.checkpointing == "auto":
        memory = with_checkpointed(config, config.model.architecture.blocks()).memory
    config = config.model_copy(update={"memory": memory})
    if config.train.reduce == "fast":
        own = {"gradient_accumulation": min(config.train.accumulation, ALIKE), "global_batch": None}
        config = config.model_copy(update={"train": config.train.model_copy(update=own)})
    file = cache_file(config, ANY, size, "-batch")
    known = read_json_or_none(file)
    if known is not None:
        return int(known["peak"])
    peak = simulate(config, size).peak.bytes
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"peak": peak}, shared=True)
    return peak


def resolve_checkpointing(
    config: AnyConfig,
    size: Size,
    card: Card | torch.device | None = None,
    reserved: int = 0,
    before: RecomputeCounts | None = None,
) -> AnyConfig:
    """Replace ``checkpointing: auto`` by a number and print it; return any other configuration unchanged.

    If nothing fits the card, all blocks are checkpointed; the prediction of the whole job then reports the misfit.

    Args:
        config: configuration with demo names resolved.
        size: width and height in pixels of the largest bucket.
        card: see ``budget_of``; likewise ``reserved``.
        before: what this run chose before; reused if it fits.

    Raises:
        UserError: the given budget is too small, or there is neither a budget nor a card.
    """
    memory, blocks = config.memory, config.model.architecture.blocks()
    if memory.checkpointing != "auto":
        return config
    peaks = partial(recompute_peak, config, size)
    budget = budget_of(config, card, reserved, "memory.checkpointing", "use all, none or a number")
    least = RecomputeCounts(blocks, blocks if memory.keep_attention == "all" else 0)
    why = ""
    if before is not None and before.keeping <= before.checkpointed <= blocks and peaks(before) <= budget:
        chosen, why = before, ", as before"
    else:
        found = find_counts(config, peaks, budget)
        if found is None and memory.budget_gib is not None:
            raise budget_error(budget, peaks(least))
        chosen = least if found is None else found
    peak = f"predicted peak {peaks(chosen) / MIB:,.0f} of {max(0, budget) / MIB:,.0f} MiB"
    keeping = f", {chosen.keeping} keeping attention's output" if chosen.keeping else ""
    detail(f"memory  checkpointing auto: {chosen.checkpointed} of {plural(blocks, 'block')}{keeping}{why}, {peak}")
    return with_checkpointed(config, *chosen)


def recompute_peak(config: TrainConfig, size: Size, which: RecomputeCounts) -> int:
    """Predict the peak of the training step in bytes with what is to be recomputed; without the libraries'
    workspaces."""
    file = cache_file(with_checkpointed(config, 0), ANY, size, "-blocks")
    config = with_checkpointed(config, *which)
    known = read_json_or_none(file) or {}
    name = f"{which.checkpointed}, {which.keeping} keeping, {config.memory.feed_forward}"
    if name not in known:
        known[name] = simulate(config, size).peak.bytes
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, dict(sorted(known.items())), shared=True)
    return int(known[name])


def with_checkpointed(config: AnyConfig, count: int, keeping: int = 0) -> AnyConfig:
    """Return the configuration with ``count`` checkpointed blocks; ``keeping`` of them keep the output of attention.

    ``feed_forward: auto`` becomes alone if that saves time.
    """
    memory = config.memory
    changes: dict[str, object] = {"checkpointing": count or "none", "budget_gib": None}
    changes["keep_attention"] = keeping or "none"
    if not count:
        changes["feed_forward"] = "auto"
    elif memory.feed_forward == "auto":
        changes["feed_forward"] = "alone" if can_recompute_feed_forward(config) else "block"
    return config.model_copy(update={"memory": memory.model_copy(update=changes)})


def find_counts(config: TrainConfig, peaks: Callable[[RecomputeCounts], int], budget: int) -> RecomputeCounts | None:
    """Find the choice whose peak fits a budget in bytes and takes the least time; None if nothing fits."""
    blocks, keep = config.model.architecture.blocks(), config.memory.keep_attention
    keeps = may_keep_attention(config) if keep == "auto" else keep == "all"
    found = find_fewest(blocks, lambda count: peaks(RecomputeCounts(count, keeps * count)), budget)
    if found is not None:
        return RecomputeCounts(found, keeps * found)
    if keep == "all" or not keeps:
        return None
    again = find_fewest(blocks, lambda count: peaks(RecomputeCounts(blocks, blocks - count)), budget)
    return None if again is None else RecomputeCounts(blocks, blocks - again)
