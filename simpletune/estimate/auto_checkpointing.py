"""``memory.checkpointing: auto``: checkpoint the fewest blocks that fit a budget or the card.

Checkpointed blocks keep the output of attention, because nothing else saves as much time per byte; if even
checkpointing all blocks does not fit then, as few blocks as possible recompute it. Feed-forward networks are recomputed
separately where that saves time.

Predicted peaks are cached under ``<cache>/estimates/``, so a different budget or less free memory costs at most one
more prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from simpletune.config.check import may_recompute_alone
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.checkpointing import fewest_that_fit, too_little
from simpletune.engine.memory.kernel_workspace import cublas_workspace
from simpletune.estimate.job_estimate import MIB, cache_file, largest_peak
from simpletune.estimate.planning import may_keep_attention
from simpletune.estimate.run_estimate import card_at_hand
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.shared.buckets import Size
from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.gpus import Card
from simpletune.system.options import UserError, plural

ANY = (8, 9)  # any CUDA capability: these peaks leave out the libraries' workspaces
NO_CARD = (
    "memory.checkpointing: auto depends on the card's memory, and there is no card here. Name one "
    "(estimate CONFIG --device L4), set memory.budget_gib, or use all, none or a number"
)


class RecomputeCounts(NamedTuple):
    """Number of checkpointed blocks, and of those among them that keep the output of attention."""

    checkpointed: int
    keeping: int = 0


class RecomputePeaks:
    """Predicted peaks of the training step in bytes, by what is recomputed."""

    def __init__(self, config: TrainConfig, size: Size):
        self._config, self._size = config, size
        self._file = cache_file(with_checkpointed(config, 0), ANY, size, "-blocks")
        cached = read_json_or_none(self._file) or {}
        self._known = {str(name): int(peak) for name, peak in cached.items()}

    def __call__(self, which: RecomputeCounts) -> int:
        config = with_checkpointed(self._config, *which)
        name = f"{which.checkpointed}, {which.keeping} keeping, {config.memory.feed_forward}"
        if name not in self._known:
            self._known[name] = simulate(config, self._size).peak.bytes
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._file, dict(sorted(self._known.items())), shared=True)
        return self._known[name]


def with_checkpointed(config: TrainConfig, count: int, keeping: int = 0) -> TrainConfig:
    """Return the configuration with ``count`` checkpointed blocks; ``keeping`` of them keep the output of attention.

    ``feed_forward: auto`` becomes alone if that saves time.
    """
    memory = config.memory
    changes: dict[str, object] = {"checkpointing": count or "none", "budget_gib": None}
    changes["keep_attention"] = keeping or "none"
    if not count:
        changes["feed_forward"] = "auto"
    elif memory.feed_forward == "auto":
        changes["feed_forward"] = "alone" if may_recompute_alone(config) else "block"
    return config.model_copy(update={"memory": memory.model_copy(update=changes)})


def fewest(config: TrainConfig, peaks: Callable[[RecomputeCounts], int], budget: int) -> RecomputeCounts | None:
    """Find the choice whose peak fits a budget in bytes and takes the least time; None if nothing fits."""
    blocks, keep = config.model.blocks(), config.memory.keep_attention
    keeps = may_keep_attention(config) if keep == "auto" else keep == "all"
    found = fewest_that_fit(blocks, lambda count: peaks(RecomputeCounts(count, keeps * count)), budget)
    if found is not None:
        return RecomputeCounts(found, keeps * found)
    if keep == "all" or not keeps:
        return None
    again = fewest_that_fit(blocks, lambda count: peaks(RecomputeCounts(blocks, blocks - count)), budget)
    return None if again is None else RecomputeCounts(blocks, blocks - again)


def budget_of(config: TrainConfig, card: Card | None, reserved: int, no_card: str) -> int:
    """Return the largest acceptable peak in bytes: ``memory.budget_gib``, or what a card has room for.

    Raises:
        UserError: there is neither; with the message ``no_card``.
    """
    if config.memory.budget_gib is not None:
        return int(config.memory.budget_gib * 2**30)
    if card is None:
        raise UserError(no_card)
    return largest_peak(card, reserved) - cublas_workspace(card.capability)


def resolve_checkpointing(
    config: TrainConfig, size: Size, card: Card | None = None, reserved: int = 0, before: RecomputeCounts | None = None
) -> TrainConfig:
    """Replace ``checkpointing: auto`` by a number and print it; return any other configuration unchanged.

    If nothing fits the card, all blocks are checkpointed; the prediction of the whole job then reports the misfit.

    Args:
        config: configuration with demo names resolved.
        size: width and height in pixels of the largest bucket.
        card: its memory, without the ``reserved`` bytes, is the budget if ``memory.budget_gib`` is not set.
        before: what this run chose before; reused if it fits.

    Raises:
        UserError: the given budget is too small, or there is neither a budget nor a card.
    """
    memory, blocks = config.memory, config.model.blocks()
    if memory.checkpointing != "auto":
        return config
    peaks, budget = RecomputePeaks(config, size), budget_of(config, card, reserved, NO_CARD)
    least = RecomputeCounts(blocks, blocks if memory.keep_attention == "all" else 0)
    why = ""
    if before is not None and before.keeping <= before.checkpointed <= blocks and peaks(before) <= budget:
        chosen, why = before, ", as before"
    else:
        found = fewest(config, peaks, budget)
        if found is None and memory.budget_gib is not None:
            raise too_little(budget, peaks(least))
        chosen = least if found is None else found
    peak = f"predicted peak {peaks(chosen) / MIB:,.0f} of {max(0, budget) / MIB:,.0f} MiB"
    keeping = f", {chosen.keeping} keeping attention's output" if chosen.keeping else ""
    say(f"memory  checkpointing auto: {chosen.checkpointed} of {plural(blocks, 'block')}{keeping}{why}, {peak}")
    return with_checkpointed(config, *chosen)


def choose_on(
    config: TrainConfig, device: torch.device, size: Size, before: RecomputeCounts | None = None
) -> TrainConfig:
    """Call ``resolve_checkpointing`` with the memory of a device."""
    if config.memory.checkpointing != "auto" or config.memory.budget_gib is not None:
        return resolve_checkpointing(config, size, before=before)
    if device.type != "cuda":
        raise UserError(
            "memory.checkpointing: auto depends on the card's free memory, and this run is on the CPU. Set "
            "memory.budget_gib too, or use all, none or a number"
        )
    card, held = card_at_hand(device)
    return resolve_checkpointing(config, size, card, held, before)
