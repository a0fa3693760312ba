"""``memory.checkpointing: auto``: as few checkpointed blocks as fit, into a budget or into the card at hand.

Peaks are predicted one number of blocks after another, and kept under ``<cache>/estimates/``: another budget, or less
that is free on the card, costs a prediction more or none.
"""

from __future__ import annotations

from pathlib import Path

import torch

from simpletune.cards import Card
from simpletune.config.schema import TrainConfig
from simpletune.estimate.forecast import card_at_hand
from simpletune.estimate.predict import MIB, key_of_prediction, largest_peak
from simpletune.estimate.simulate import simulate
from simpletune.memory.checkpointing import fewest_checkpointed, fewest_that_fit
from simpletune.memory.device_terms import cublas_workspace
from simpletune.models.buckets import Size
from simpletune.options import UserError, plural
from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import write_json
from simpletune.system.console import say

ANY = (8, 9)  # a capability: libraries' workspaces are not in these peaks
NO_CARD = (
    "memory.checkpointing: auto keeps what the card at hand has room for, and no card is here or named. Name one "
    "(estimate CONFIG --device L4), give memory.budget_gib, or use all, none or a number"
)


class Peaks:
    """Predicted peaks of the training step, in bytes, by how many blocks are checkpointed.

    Args:
        config: with demo names resolved.
        size: width and height in pixels of the largest bucket.
    """

    def __init__(self, config: TrainConfig, size: Size):
        self._config, self._size = config, size
        key = key_of_prediction(with_checkpointed(config, 0), ANY, size)
        self._file = Path(config.output.cache) / "estimates" / f"{key}-blocks.json"
        cached = read_json_or_none(self._file) or {}
        self._known = {int(count): int(peak) for count, peak in cached.items()}

    def __call__(self, count: int) -> int:
        """The peak with so many blocks checkpointed."""
        if count not in self._known:
            self._known[count] = simulate(with_checkpointed(self._config, count), self._size).peak.bytes
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._file, {str(each): self._known[each] for each in sorted(self._known)}, shared=True)
        return self._known[count]


def with_checkpointed(config: TrainConfig, count: int) -> TrainConfig:
    """The configuration with so many blocks checkpointed."""
    memory = config.memory.model_copy(update={"checkpointing": count or "none", "budget_gib": None})
    return config.model_copy(update={"memory": memory})


def choose(
    config: TrainConfig, size: Size, card: Card | None = None, reserved: int = 0, before: int | None = None
) -> TrainConfig:
    """The configuration with ``checkpointing: auto`` replaced by a number, which is said; another as it is.

    Where not even all blocks checkpointed fit a card, all are: whoever asks sees by the whole job that it does not fit.

    Args:
        config: with demo names resolved.
        size: width and height in pixels of the largest bucket.
        card: whose memory is the budget where ``memory.budget_gib`` is not given.
        reserved: bytes of it that other programs hold.
        before: what this run has chosen before: kept where it fits.

    Raises:
        UserError: the given budget is too little; there is neither a budget nor a card.
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
    """As ``choose``, for the device at hand."""
    if config.memory.checkpointing != "auto" or config.memory.budget_gib is not None:
        return choose(config, size, before=before)
    if device.type != "cuda":
        raise UserError(
            "memory.checkpointing: auto takes what is free on the card, and this run is on the CPU. Give "
            "memory.budget_gib too, or use all, none or a number"
        )
    card, held = card_at_hand(device)
    return choose(config, size, card, held, before)
