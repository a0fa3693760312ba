"""Check a whole configuration: all rules between its sections, in the order in which their problems are reported."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.config.batches import batch_rules
from simpletune.config.rules.adapter import adapter_rules
from simpletune.config.rules.family import family_rules
from simpletune.config.rules.fsdp import fsdp_rules
from simpletune.config.rules.optimizer import optimizer_rules
from simpletune.config.rules.recompute import recompute_rules
from simpletune.config.rules.stream import stream_rules
from simpletune.config.rules.text import text_rules
from simpletune.config.schema import TrainConfig
from simpletune.system.options import Problem, plural


def config_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check combinations of options by the components' capabilities, not by their names."""
    if config.adapter.trains_base and not config.precision.trainable:
        yield Problem(
            "precision.weights",
            f"{config.precision.weights} weights are frozen, but adapter.method {config.adapter.method} trains them. "
            "Use precision.weights bf16 or fp32, or adapter.method lora",
        )
    if config.memory.modulation == "plan" and config.adapter.trains_base:
        yield Problem(
            "memory.modulation",
            "plan freezes the modulation weights and removes them from the model, but adapter.method "
            f"{config.adapter.method} trains and exports the whole model. Use memory.modulation resident, or "
            "adapter.method lora",
        )
    yield from family_rules(config)
    yield from adapter_rules(config)
    yield from optimizer_rules(config)
    yield from text_rules(config)
    yield from config.prior.rules(config.adapter, config.data, config.memory)
    yield from _fp16_rules(config)
    yield from _streaming_rules(config)
    yield from config.memory.rules()
    yield from recompute_rules(config)
    yield from config.precision.rules()
    yield from _in_backward_rules(config)
    yield from batch_rules(config)
    yield from stream_rules(config)
    yield from fsdp_rules(config)
    yield from config.checkpoint.rules()
    yield from config.output.rules()
    if config.train.steps is not None and config.train.epochs is not None:
        yield Problem("train.epochs", "steps and epochs are both set. Remove one of them")
    if config.train.steps is not None and config.schedule.warmup_steps >= config.train.steps:
        yield Problem(
            "schedule.warmup_steps",
            f"{plural(config.schedule.warmup_steps, 'warm-up step')} must be fewer than the run's "
            f"{plural(config.train.steps, 'step')}. Use fewer",
        )
    yield from config.validation.rules()
    for side in ("width", "height"):
        if (getattr(config.validation, side) or 0) > 4096:
            yield Problem(f"validation.{side}", f"{getattr(config.validation, side)} is over 4096 px. Use less")


def _fp16_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check what fp16 products require."""
    if config.precision.settled != "fp16":
        return
    if config.adapter.trains_base and config.precision.trainable and config.precision.bytes_per_weight < 4:
        yield Problem(
            "precision.weights",
            f"adapter.method {config.adapter.method} would train 16-bit weights with fp16 products, whose updates "
            "are lost. Use precision.weights fp32, which multiplies in fp16 by autocast, or adapter.method lora",
        )
    if not config.optimizer.undoes:
        yield Problem(
            "optimizer.name",
            f"{config.optimizer.name} cannot undo the step whose scaled gradients overflow in fp16 without waiting "
            "for the device. Use adamw8bit",
        )


def _streaming_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check what block offload requires."""
    if config.memory.resident_blocks is None:
        return
    if config.adapter.trains_base and not config.memory.optimizer_in_backward:
        yield Problem(
            "memory.resident_blocks",
            f"adapter.method {config.adapter.method} trains the offloaded weights, which must be updated while on the "
            "device. Use memory.optimizer_in_backward true, or resident_blocks null",
        )
    if not config.precision.can_offload:
        yield Problem(
            "memory.resident_blocks",
            f"{config.precision.weights} weights cannot be offloaded block by block. Use resident_blocks null, or "
            "precision.weights int8",
        )


def _in_backward_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report options that need all gradients at once if the backward pass frees each after its update."""
    if not config.memory.optimizer_in_backward:
        return
    if config.train.clip_norm is not None and config.train.clip == "global":
        yield Problem(
            "train.clip",
            "global clipping needs all gradients at once, but memory.optimizer_in_backward frees each after its "
            "update. Use train.clip per_parameter, or train.clip_norm null",
        )
    if config.train.accumulation > 1:
        field = "gradient_accumulation" if config.train.global_batch is None else "global_batch"
        yield Problem(
            f"train.{field}",
            f"{config.train.accumulation} passes accumulate gradients, but memory.optimizer_in_backward "
            "keeps none. Use gradient_accumulation 1 with a larger batch_size, or optimizer_in_backward false",
        )
    if config.train.on_nonfinite == "skip":
        yield Problem(
            "train.on_nonfinite",
            "skip needs all gradients before the update, but memory.optimizer_in_backward updates the weights "
            "during the backward pass. Use stop, or optimizer_in_backward false",
        )
    if not config.optimizer.steps_in_backward:
        yield Problem(
            "memory.optimizer_in_backward",
            f"optimizer.name {config.optimizer.name} needs all gradients at once. Use another optimizer, or false",
        )
