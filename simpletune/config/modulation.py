"""Resolve ``memory.modulation: auto``: use the plan on a GPU if nothing trains the modulation."""

from __future__ import annotations

from typing import Literal, get_args

from simpletune.config.batches import AnyConfig
from simpletune.config.schema import TrainConfig
from simpletune.models.shared.model_config import Shape
from simpletune.system.console import detail
from simpletune.system.options import join_names

Settled = Literal["resident", "plan"]


def settle_modulation(config: AnyConfig, on_host: bool, before: str | None = None) -> AnyConfig:
    """Replace ``modulation: auto`` and print the choice; return other configurations unchanged.

    Demo names are resolved and the model is known. A resumed run keeps ``before``, the choice of its first start.
    """
    if config.memory.modulation != "auto":
        return config
    if config.model.architecture.modulation is None:
        kind = "resident"
    else:
        kind, why = auto_modulation(config, on_host)
        if before is not None and before in get_args(Settled):
            kind, why = before, "as before"
        detail(f"memory  modulation {kind} (auto: {why})")
    return config.model_copy(update={"memory": config.memory.model_copy(update={"modulation": kind})})


def auto_modulation(config: TrainConfig, on_host: bool, shapes: dict[str, Shape] | None = None) -> tuple[str, str]:
    """Return what auto means, and why; ``shapes`` are the base's, read from its folder if not given."""
    if config.adapter.trains_base:
        return "resident", f"adapter.method {config.adapter.method} trains it"
    if config.trains_conditioning:
        return "resident", "the text encoders change the pooled prompt in every step"
    trained = config.trained_modulation(config.model.architecture.known_shapes() if shapes is None else shapes)
    if trained:
        return "resident", f"adapter.targets trains {join_names(trained, 1)}"
    if on_host:
        return "resident", "on the CPU, host and device share one memory"
    return "plan", "its weights are frozen and stay in host memory"
