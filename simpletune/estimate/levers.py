"""Changes to a configuration that save memory, the cost of each, and what it would save for a given run.

Savings are predicted by running the training step of the changed configuration on fake tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simpletune.config.load import validate
from simpletune.config.overrides import merge
from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate.simulate import simulate
from simpletune.system.options import ConfigError


@dataclass(frozen=True)
class Lever:
    """A change that saves memory."""

    overrides: tuple[str, ...]
    """As on the command line."""
    costs: str
    """What the change costs, in a few words."""


LEVERS = (
    Lever(("memory.crop_positions=true",), "nothing"),
    Lever(("memory.modulation=plan",), "host memory and a little time; exact"),
    Lever(("optimizer.name=adamw8bit",), "8-bit optimizer state"),
    Lever(("adapter.dtype=bf16",), "LoRA weights in bf16, rounded stochastically"),
    Lever(("memory.checkpointing=all",), "about a third more time; exact"),
    Lever(("memory.feed_forward=1024",), "feed-forward networks in tiles of 1024 tokens"),
    Lever(("memory.offload_checkpoint_inputs=true",), "traffic to the host; exact"),
    Lever(("memory.vae_tile=512",), "pictures are encoded and decoded in tiles"),
    Lever(("memory.optimizer_in_backward=true", "train.clip=per_parameter"), "clipping per parameter"),
    Lever(("precision.weights=int8",), "8-bit base weights"),
    Lever(("precision.weights=nf4",), "4-bit base weights"),
    Lever(("memory.resident_blocks=4",), "traffic from the host; exact"),
    Lever(("memory.resident_blocks=0",), "more traffic from the host; exact"),
    Lever(("train.batch_size=1",), "noisier gradients"),
    Lever(("data.resolution=768",), "smaller pictures"),
    Lever(("data.resolution=512",), "smaller pictures"),
)
# What the changes that may cost quality do.
IN_WORDS = {
    "precision.weights": "the frozen weights are rounded to {new} instead of {old}",
    "adapter.dtype": "the adapter's own weights are kept in {new} instead of {old}, rounded stochastically",
    "optimizer.name": "the optimizer is {new} instead of {old}",
    "train.clip": "gradients are clipped {new} instead of {old}",
    "train.gradient_accumulation": "an update follows {new} instead of {old} micro-batches: noisier, but more of them",
    "memory.vae_tile": "pictures are encoded and decoded in overlapping tiles ({new} instead of {old})",
}


def with_changes(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig | None:
    """Apply overrides to a configuration as the command line does; None if the result is invalid."""
    data, _, problems = merge(config.model_dump(mode="json", by_alias=True), in_place(config, overrides))
    try:
        return validate(data, "", problems, needs_data=False)
    except ConfigError:
        return None


def in_place(config: TrainConfig, overrides: Sequence[str]) -> list[str]:
    """Return the overrides; for a run from prompts alone, with the side of its drawings for ``data.resolution``."""
    name, concept = "data.resolution=", config.concept is not None
    return [
        f"concept.resolutions=[{text.removeprefix(name)}]" if concept and text.startswith(name) else text
        for text in overrides
    ]


def with_effective_changes(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig | None:
    """Apply overrides like ``with_changes``; return None also if nothing changes."""
    new = with_changes(config, overrides)
    return None if new == config else new


def savings(config: TrainConfig) -> list[tuple[Lever, int]]:
    """Predict the bytes that each lever would save of the training step, largest first; demo names must be resolved."""
    before = simulate(config).peak.bytes
    result = []
    for lever in LEVERS:
        new = with_effective_changes(config, lever.overrides)
        if new is None or new.resolution > config.resolution:
            continue
        saved = before - simulate(new).peak.bytes
        if saved > 0:
            result.append((replace(lever, overrides=tuple(in_place(config, lever.overrides))), saved))
    return sorted(result, key=lambda saving: -saving[1])


def effective_overrides(config: TrainConfig, new: TrainConfig, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change a value."""
    before, after = (each.model_dump(mode="json", by_alias=True) for each in (config, new))
    paths = {text: text.partition("=")[0] for text in in_place(config, overrides)}
    return [text for text, path in paths.items() if _value_at(before, path) != _value_at(after, path)]


def changes_of_quality(config: TrainConfig, new: TrainConfig) -> list[str]:
    """Describe what the changes that may cost quality do; weights with at least as many bits are no such change."""
    before, after = (each.model_dump(mode="json", by_alias=True) for each in (config, new))
    fewer_bits = new.precision.bytes_per_weight < config.precision.bytes_per_weight
    found = []
    for path, words in IN_WORDS.items():
        values = [_value_at(data, path) for data in (before, after)]
        if values[0] != values[1] and (fewer_bits or path != "precision.weights"):
            old, now = (value if isinstance(value, str) else json.dumps(value) for value in values)
            found.append(f"{words.format(old=old, new=now)} ({path})")
    return found


def _value_at(data: Mapping[str, object], path: str) -> object:
    """Look up the value at a dotted path."""
    value: object = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
