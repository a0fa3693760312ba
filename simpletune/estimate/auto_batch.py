"""``train.batch_size: auto``: the largest micro-batch that divides ``train.global_batch`` and fits.

Predicted peaks are cached under ``<cache>/estimates/``, so a second start asks for no prediction.
"""

from __future__ import annotations

import torch

from simpletune.config.batches import of_process, sizes_of, with_batch
from simpletune.config.schema import TrainConfig
from simpletune.estimate.auto_checkpointing import ANY, budget_of, with_checkpointed
from simpletune.estimate.job_estimate import MIB, cache_file
from simpletune.estimate.run_estimate import card_at_hand
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.shared.buckets import Size
from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.gpus import Card
from simpletune.system.options import UserError, plural

NO_CARD = (
    "train.batch_size: auto depends on the card's memory, and there is no card here. Name one "
    "(estimate CONFIG --device L4), set memory.budget_gib, or set a number"
)
ALIKE = 2  # gradients of micro-batches add up in place: more of them in a step take no more memory


def peak_of(config: TrainConfig, size: Size) -> int:
    """Predict the peak of the training step in bytes, without the libraries' workspaces. With ``checkpointing: auto``,
    all blocks are checkpointed."""
    memory = config.memory.model_copy(update={"budget_gib": None})
    if memory.checkpointing == "auto":
        memory = with_checkpointed(config, config.model.blocks()).memory
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


def choose_batch(
    config: TrainConfig, size: Size, processes: int = 1, card: Card | None = None, reserved: int = 0
) -> TrainConfig:
    """Replace ``batch_size: auto`` by a number and print it; return any other configuration unchanged.

    If nothing fits, the number is 1; the prediction of the whole job then reports the misfit.

    Args:
        config: configuration with demo names and ``memory.modulation`` resolved.
        size: width and height in pixels of the largest bucket.
        processes: number of processes.
        card: its memory, without the ``reserved`` bytes, is the budget if ``memory.budget_gib`` is not set.

    Raises:
        UserError: there is neither a budget nor a card.
    """
    train = config.train
    if train.batch_size != "auto":
        return config
    assert train.global_batch is not None, "a rule"
    budget = budget_of(config, card, reserved, NO_CARD)
    sizes = sizes_of(train.global_batch, processes)
    low, high = 0, len(sizes) - 1  # range of indices of the largest that fits; the smallest need not fit
    while low < high:
        middle = (low + high + 1) // 2
        fits = peak_of(of_process(with_batch(config, sizes[middle]), processes), size) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    chosen = with_batch(config, sizes[low])
    peak = peak_of(of_process(chosen, processes), size)
    micros = plural(chosen.train.accumulation, "micro-batch", "micro-batches")
    say(
        f"batch   auto: {micros} of {plural(sizes[low], 'picture')} a step, predicted peak {peak / MIB:,.0f} of "
        f"{max(0, budget) / MIB:,.0f} MiB"
    )
    return chosen


def choose_batch_on(config: TrainConfig, device: torch.device, size: Size, processes: int) -> TrainConfig:
    """Call ``choose_batch`` with the memory of a device."""
    if config.train.batch_size != "auto" or config.memory.budget_gib is not None:
        return choose_batch(config, size, processes)
    if device.type != "cuda":
        raise UserError(
            "train.batch_size: auto depends on the card's free memory, and this run is on the CPU. Set "
            "memory.budget_gib too, or a number"
        )
    card, held = card_at_hand(device)
    return choose_batch(config, size, processes, card, held)
