"""Check what the optimizer requires of other options, by its capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.engine.optim.schedule import Constant
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


def optimizer_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report problems of the optimizer's options, and a schedule or EMA beside an optimizer that averages the weights
    itself."""
    yield from config.optimizer.rules()
    if not config.optimizer.averages:
        return
    name = config.optimizer.name
    if not isinstance(config.schedule, Constant):
        yield Problem(
            "schedule.name",
            f"{config.schedule.name} lowers the learning rate, but optimizer.name {name} averages the weights instead. "
            "Use constant",
        )
    if config.ema is not None:
        yield Problem("ema", f"optimizer.name {name} averages the weights itself. Use ema null, or another optimizer")
