"""``memory.modulation: auto``: the plan where nothing trains the modulation and the device is not the host."""

from __future__ import annotations

from typing import Literal, get_args

from simpletune.config.schema import TrainConfig
from simpletune.models.sd3_shapes import parameter_shapes
from simpletune.options import shortened
from simpletune.system.console import say

Settled = Literal["resident", "plan"]


def settle_modulation(config: TrainConfig, on_host: bool, before: str | None = None) -> TrainConfig:
    """The configuration with ``modulation: auto`` replaced, which is said; another as it is.

    Args:
        config: with demo names resolved, its model known.
        on_host: whether the device is the CPU.
        before: what this run has chosen before: a resumed run keeps it.
    """
    if config.memory.modulation != "auto":
        return config
    kind, why = _chosen(config, on_host)
    if before is not None and before in get_args(Settled):
        kind, why = before, "as before"
    say(f"memory  modulation {kind} (auto: {why})")
    return config.model_copy(update={"memory": config.memory.model_copy(update={"modulation": kind})})


def _chosen(config: TrainConfig, on_host: bool) -> tuple[str, str]:
    """Which, and why in words."""
    if config.adapter.trains_base:
        return "resident", f"adapter.method {config.adapter.method} trains it"
    trained = config.trained_modulation(parameter_shapes(config.model.known_config()))
    if trained:
        return "resident", f"adapter.targets trains {shortened(trained, 1)}"
    if on_host:
        return "resident", "on the CPU device and host are one memory"
    return "plan", "nothing trains it, so its weights stay in host memory"
