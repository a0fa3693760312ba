"""``memory.checkpointing: auto``: checkpoint the fewest blocks that fit a budget or the card.

Predicted peaks are cached under ``<cache>/estimates/``, so a different budget or less free memory costs at most one
more prediction.
"""

from __future__ import annotations

import torch

from simpletune.cards import Card
from simpletune.config.schema import TrainConfig
from simpletune.estimate.forecast import card_at_hand
from simpletune.estimate.predict import MIB, key_of_prediction, largest_peak
from simpletune.memory.checkpointing import fewest_checkpointed, fewest_that_fit
from simpletune.memory.device_terms import cublas_workspace
from simpletune.models.buckets import Size
from simpletune.options import UserError, plural
from simpletune.runs.folder import read_json_or_none
from simpletune.simulation.simulate import simulate
from simpletune.system.atomic import write_json
from simpletune.system.console import say

ANY = (8, 9)  # any CUDA capability: these peaks leave out the libraries' workspaces
NO_CARD = (
    "memory.checkpointing: auto depends on the card's memory, and there is no card here. Name one "
    "(estimate CONFIG --device L4), set memory.budget_gib, or use all, none or a number"
)


class Peaks:
    """Predicted peaks of the training step in bytes, by number of checkpointed blocks.

    Args:
        config: with demo names resolved.
        size: width and height in pixels of the largest bucket.
    """

    def __init__(self, config: TrainConfig, size: Size):
        self._config, self._size = config, size
        key = key_of_prediction(with_checkpointed(config, 0), ANY, size)
        self._file = config.output.cache_folder / "estimates" / f"{key}-blocks.json"
        cached = read_json_or_none(self._file) or {}
        self._known = {int(count): int(peak) for count, peak in cached.items()}

    def __call__(self, count: int) -> int:
        """Predict the peak with ``count`` blocks checkpointed."""
        if count not in self._known:
            self._known[count] = simulate(with_checkpointed(self._config, count), self._size).peak.bytes
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._file, {str(each): self._known[each] for each in sorted(self._known)}, shared=True)
        return self._known[count]


def with_checkpointed(config: TrainConfig, count: int) -> TrainConfig:
    """Return the configuration with ``count`` blocks checkpointed."""
    memory = config.memory.model_copy(update={"checkpointing": count or "none", "budget_gib": None})
    return config.model_copy(update={"memory": memory})


def choose(
    config: TrainConfig, size: Size, card: Card | None = None, reserved: int = 0, before: int | None = None
) -> TrainConfig:
    """Replace ``checkpointing: auto`` by a number and print it; return any other configuration unchanged.

    If nothing fits the card, all blocks are checkpointed; the prediction of the whole job then reports the misfit.

    Args:
        config: with demo names resolved.
        size: width and height in pixels of the largest bucket.
        card: its memory is the budget if ``memory.budget_gib`` is not set.
        reserved: bytes of the card that other programs use.
        before: the number that this run chose earlier; reused if it fits.

    Raises:
        UserError: the given budget is too small, or there is neither a budget nor a card.
    """
    memory, blocks = config.memory, config.model.blocks()
    if memory.checkpointing != "auto":
        return config
    peaks = Peaks(config, size)
    if memory.budget_gib is not None:
        budget = int(memory.budget_gib * 2**30)
    elif card is not None:
        budget = largest_peak(card, reserved) - cublas_workspace(card.capability)
    else:
        raise UserError(NO_CARD)
    if before is not None and before <= blocks and peaks(before) <= budget:
        count, why = before, ", as before"
    elif memory.budget_gib is not None:
        count, why = fewest_checkpointed(blocks, peaks, budget), ""
    else:
        fewest = fewest_that_fit(blocks, peaks, budget)
        count, why = (blocks, "") if fewest is None else (fewest, "")
    peak = f"predicted peak {peaks(count) / MIB:,.0f} of {max(0, budget) / MIB:,.0f} MiB"
    say(f"memory  checkpointing auto: {count} of {plural(blocks, 'block')}{why}, {peak}")
    return with_checkpointed(config, count)


def choose_on(config: TrainConfig, device: torch.device, size: Size, before: int | None = None) -> TrainConfig:
    """Call ``choose`` with the memory of a device."""
    if config.memory.checkpointing != "auto" or config.memory.budget_gib is not None:
        return choose(config, size, before=before)
    if device.type != "cuda":
        raise UserError(
            "memory.checkpointing: auto depends on the card's free memory, and this run is on the CPU. Set "
            "memory.budget_gib too, or use all, none or a number"
        )
    card, held = card_at_hand(device)
    return choose(config, size, card, held, before)
