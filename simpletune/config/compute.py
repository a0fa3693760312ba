"""Resolve ``precision.compute: auto`` for the device that trains, and refuse what it cannot do. Imports no torch."""

from __future__ import annotations

from typing import get_args

from simpletune.config.check import config_rules
from simpletune.config.schema import TrainConfig
from simpletune.system.console import say
from simpletune.system.devices import BF16_FROM, sm
from simpletune.system.options import ConfigError, Json, UserError

Capability = tuple[int, int]


def settle_compute(config: TrainConfig, capability: Capability | None, before: str | None = None) -> TrainConfig:
    """Replace ``compute: auto``, and print the choice unless it is bf16; return other configurations unchanged.

    Args:
        capability: CUDA compute capability of the device; None: the CPU.
        before: the type chosen when the run first started, which a resumed run keeps.

    Raises:
        UserError: the device does not support the type that the run was started with.
        ConfigError: the configuration has options that the resolved type excludes.
    """
    if config.precision.compute != "auto":
        return config
    has_bf16 = capability is None or capability >= BF16_FROM
    chosen = config.precision.auto_compute(has_bf16)
    settled = _with(config, chosen)
    kept = kept_compute(config, before)
    if kept.precision.compute not in ("auto", chosen):
        if before == "bf16" and not has_bf16:
            raise UserError(
                f"--resume: the run was started with precision.compute bf16, which {_device(capability)} lacks. "
                "Continue on a card of sm_80 or newer, or start a new run under another name"
            )
        say(f"compute {before} as before (auto would be {chosen} on this device; a new run under another name uses it)")
        return kept
    if not has_bf16:
        say(f"compute {chosen} (auto: {_device(capability)} has no bf16)")
    problems = list(config_rules(settled))
    if problems:
        raise ConfigError(problems, f"precision.compute {chosen} (auto on {_device(capability)})")
    return settled


def compute_to_generate(config: TrainConfig, capability: Capability | None) -> TrainConfig:
    """Replace ``compute`` for inference: auto by what the device supports, and bf16 on a card that lacks it."""
    compute = config.precision.compute
    has_bf16 = capability is None or capability >= BF16_FROM
    if compute != "auto" and (compute != "bf16" or has_bf16):
        return config
    chosen = config.precision.auto_compute(has_bf16)
    if not has_bf16:
        say(f"compute {chosen} ({_device(capability)} has no bf16)")
    return _with(config, chosen)


def kept_compute(config: TrainConfig, before: str | None) -> TrainConfig:
    """Replace ``compute: auto`` by the type chosen when the run first started, if this weight precision supports it."""
    precision = config.precision
    known = get_args(type(precision).model_fields["compute"].annotation)
    return _with(config, before) if precision.compute == "auto" and before in known else config


def _with(config: TrainConfig, compute: str | None) -> TrainConfig:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"compute": compute})})


def compute_of(saved: Json | None) -> str | None:
    """Return ``precision.compute`` of a saved configuration, or None."""
    precision = (saved or {}).get("precision")
    compute = precision.get("compute") if isinstance(precision, dict) else None
    return compute if isinstance(compute, str) and compute != "auto" else None


def _device(capability: Capability | None) -> str:
    return "the CPU" if capability is None else sm(capability)
