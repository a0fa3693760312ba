"""What can be changed in a configuration for less memory, what each change costs, and what it would save here.

Savings are predicted by running the training step of the changed configuration on fake tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from simpletune.config import TrainConfig
from simpletune.data.buckets import Size
from simpletune.memory import count_blocks
from simpletune.memory.checkpointing import fewest_checkpointed
from simpletune.simulate import simulate


@dataclass(frozen=True)
class Lever:
    """One change.

    Args:
        changes: new values by dotted path.
        costs: what is given for the memory, in a few words.
    """

    changes: Mapping[str, Any]
    costs: str

    @property
    def overrides(self) -> str:
        """The change as the command line takes it."""
        return " ".join(f"{path}={_text(value)}" for path, value in self.changes.items())


LEVERS = (
    Lever({"memory.crop_positions": True}, "nothing"),
    Lever({"memory.modulation": "plan"}, "host memory, a little time; exact"),
    Lever({"optimizer": {"name": "adamw8bit"}}, "8-bit optimizer state"),
    Lever({"adapter.dtype": "bf16"}, "LoRA weights in bf16, rounded stochastically"),
    Lever({"memory.checkpointing": "all"}, "about a third more time; exact"),
    Lever({"memory.boundaries": "host"}, "traffic to the host; exact"),
    Lever({"memory.optimizer_in_backward": True, "train.clip": "per_parameter"}, "clipping by parameter"),
    Lever({"precision": {"weights": "int8"}}, "8-bit base weights"),
    Lever({"precision": {"weights": "nf4"}}, "4-bit base weights"),
    Lever({"memory.resident_blocks": 4}, "traffic from the host; exact"),
    Lever({"memory.resident_blocks": 0}, "more traffic from the host; exact"),
    Lever({"train.batch_size": 1}, "noisier gradients"),
    Lever({"data.resolution": 768}, "smaller pictures"),
    Lever({"data.resolution": 512}, "smaller pictures"),
)


@dataclass(frozen=True)
class Saving:
    """What a change would do here.

    Args:
        lever: the change.
        config: with the change.
        peak_bytes: of the training stage with it.
        saved_bytes: against the configuration as it is.
    """

    lever: Lever
    config: TrainConfig
    peak_bytes: int
    saved_bytes: int


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return next(iter(value.values()))
    return value if isinstance(value, str) else json.dumps(value)


def changed(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig | None:
    """The configuration with changes; None where they cannot be, or change nothing.

    A value that is an object replaces a whole option: fields of the old one that the new one knows are kept.
    """
    data = config.model_dump(mode="json", by_alias=True)
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        here = data
        for part in parents:
            here = here[part]
        here[leaf] = {**_kept(here[leaf]), **value} if isinstance(value, Mapping) else value
    try:
        new = TrainConfig.model_validate_json(json.dumps(data))
    except ValidationError:
        return None
    return None if new == config or list(new.rules()) else new


def _kept(option: Mapping[str, Any]) -> dict[str, Any]:
    """What survives another member's tag: the learning rate of an optimizer, the product type of a precision."""
    return {key: value for key, value in option.items() if key in ("lr", "weight_decay", "compute")}


def savings(config: TrainConfig) -> list[Saving]:
    """What each lever would save, the most first.

    Args:
        config: with demo names resolved.
    """
    before = simulate(config).peak.bytes
    found = []
    for lever in LEVERS:
        new = changed(config, lever.changes)
        if new is None or new.data.resolution > config.data.resolution:
            continue
        peak = simulate(new).peak.bytes
        if peak < before:
            found.append(Saving(lever, new, peak, before - peak))
    return sorted(found, key=lambda saving: -saving.saved_bytes)


def within_budget(config: TrainConfig, size: Size | None = None) -> TrainConfig:
    """With ``checkpointing: auto``: the configuration with the fewest checkpointed blocks that fit the budget.

    Args:
        config: with demo names resolved; with another ``checkpointing`` it is returned as it is.
        size: (width, height) in pixels of the largest bucket; None: the square of ``data.resolution``.

    Raises:
        UserError: not even with all blocks checkpointed does it fit.
    """
    memory = config.memory
    if memory.checkpointing != "auto" or memory.budget_gib is None:
        return config

    def with_blocks(count: int) -> TrainConfig:
        chosen = {"checkpointing": count or "none", "budget_gib": None}
        return config.model_copy(update={"memory": memory.model_copy(update=chosen)})

    blocks = count_blocks(config.model.shapes(fetch=False) or config.model.shapes() or ())
    budget = int(memory.budget_gib * 2**30)
    count = fewest_checkpointed(blocks, lambda number: simulate(with_blocks(number), size).peak.bytes, budget)
    return with_blocks(count)
