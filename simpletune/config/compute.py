"""Resolve ``precision.compute: auto`` for the device that trains, and refuse what it cannot do. Imports no torch."""

from __future__ import annotations

from typing import get_args

from simpletune.config.check import config_rules, fp16_refusal
from simpletune.config.schema import TrainConfig
from simpletune.system.console import detail, say
from simpletune.system.devices import BF16_FROM, sm
from simpletune.system.options import ConfigError, Json, UserError

Capability = tuple[int, int]


def settle_compute(config: TrainConfig, capability: Capability | None, saved: Json | None = None) -> TrainConfig:
    """Replace ``compute: auto``, and print the choice unless it is bf16; return other configurations unchanged.

    Args:
        capability: CUDA compute capability of the device; None: the CPU.
        saved: configuration of the checkpoint that a run continues from: it keeps the type that it started with.

    Raises:
        UserError: the device does not support the type that the run was started with.
        ConfigError: the configuration has options that the resolved type excludes.
    """
    if config.precision.compute != "auto":
        return config
    has_bf16 = capability is None or capability >= BF16_FROM
    chosen = config.precision.auto_compute(has_bf16)
    earlier = with_saved_compute(config, saved)
    before = earlier.precision.compute
    if before not in ("auto", chosen):
        if before == "bf16" and not has_bf16:
            raise UserError(
                f"--resume: the run was started with precision.compute bf16, which {_device(capability)} lacks. "
                "Continue on a card of sm_80 or newer, or start a new run under another name"
            )
        say(f"compute {before} as before (auto would be {chosen} on this device; a new run under another name uses it)")
        return earlier
    if not has_bf16:
        detail(f"compute {chosen} (auto: {_device(capability)} has no bf16)")
    settled = _with_compute(config, chosen)
    if chosen == "fp16" and config.memory.feed_forward == "alone":  # which fp16 excludes; with the block is as exact
        settled = settled.model_copy(update={"memory": config.memory.model_copy(update={"feed_forward": "block"})})
    problems = list(config_rules(settled))
    if problems:
        raise ConfigError(problems, f"precision.compute {chosen} (auto on {_device(capability)})")
    return settled


def compute_to_generate(config: TrainConfig, capability: Capability | None) -> TrainConfig:
    """Replace ``compute`` for inference: auto by what the device supports, and bf16 on a card that lacks it. Raises
    UserError if the model cannot be computed there."""
    compute = config.precision.compute
    has_bf16 = capability is None or capability >= BF16_FROM
    if compute != "auto" and (compute != "bf16" or has_bf16):
        return config
    chosen = config.precision.auto_compute(has_bf16)
    if chosen == "fp16" and (why := config.model.architecture.fp16_overflows):
        raise UserError(f"{_device(capability)} has no bf16, and {fp16_refusal(config.model.words.title, why)}")
    if not has_bf16:
        say(f"compute {chosen} ({_device(capability)} has no bf16)")
    return _with_compute(config, chosen)


def with_saved_compute(config: TrainConfig, saved: Json | None) -> TrainConfig:
    """Replace ``compute: auto`` by the type that the run chose when it first started and a checkpoint saved, if this
    weight precision supports it."""
    section = (saved or {}).get("precision")
    before = section.get("compute") if isinstance(section, dict) else None
    known = get_args(type(config.precision).model_fields["compute"].annotation)
    return _with_compute(config, before) if config.precision.compute == "auto" and before in known else config


def _with_compute(config: TrainConfig, compute: str | None) -> TrainConfig:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"compute": compute})})


def _device(capability: Capability | None) -> str:
    return "the CPU" if capability is None else sm(capability)
