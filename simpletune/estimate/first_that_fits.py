"""Find the first of several settings that fits a card, with as few predictions as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from simpletune.config.schema import TrainConfig

GRADIENT = 2  # bytes per trained weight: bf16, if gradients outlive the backward pass
ACTIVATIONS = 1.05  # factor on what stays in memory: the least that a step adds; only to begin the search with


def first_that_fits(count: int, fits: Callable[[int], bool], likely: int = 0, known: int | None = None) -> int | None:
    """Bisect for the first of several settings that fits; None if none does.

    Each setting takes less memory than the one before. Predicting a setting that almost fits takes as long as one that
    fits, so the search begins at the likely answer.

    Args:
        count: number of settings.
        fits: predicts whether a setting fits; called at most once for each.
        likely: the likely answer; ``count`` or more: probably none fits.
        known: a setting that is known to fit, if any.
    """
    low, high = 0, count if known is None else known  # none below low fits; high does, or equals count
    asked = min(likely, high - 1)
    while low < high:
        if fits(asked):
            high = asked
            asked = asked - 1 if asked == likely else (low + high) // 2
        else:
            low = asked + 1
            asked = count - 1 if high == count else (low + high) // 2
    return low if low < count else None


def likely_first(configs: Sequence[TrainConfig], room: int) -> int:
    """Return the index of the first configuration whose weights, states and gradients leave room for a step, or their
    number.

    Args:
        configs: configurations by decreasing memory.
        room: bytes of the card for a step.
    """
    return next((n for n, config in enumerate(configs) if ACTIVATIONS * lasting(config) <= room), len(configs))


def lasting(config: TrainConfig) -> float:
    """Estimate the device bytes that weights, their optimizer states and gradients take throughout a step."""
    model, trains = config.model, config.adapter.trains_base
    on_host, found = config.memory.on_host(model.units()), 0.0
    for name, shape in model.known_shapes().items():
        if not on_host(name):
            found += math.prod(shape) * config.precision.bytes_per_weight
            found += math.prod(shape) * config.optimizer.bytes_per_parameter * trains
            found += math.prod(shape) * GRADIENT * (trains and not config.memory.optimizer_in_backward)
    return found
