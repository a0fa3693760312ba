"""Check what dividing the weights among processes (``train.fsdp``) requires of other options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.system.options import Problem

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


def fsdp_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report options that do not work when each process holds only a part of the weights."""
    if config.train.fsdp == "none":
        return
    none = "or train.fsdp none"
    if not config.adapter.supports_fsdp:
        yield Problem(
            "train.fsdp",
            f"full divides what trains, and adapter.method {config.adapter.method} trains little beside a frozen "
            "base, of which each process keeps a whole copy: quantised, that takes the least memory. Use none, or "
            "adapter.method full",
        )
    if not config.model.supports_fsdp:
        yield Problem(
            "train.fsdp",
            f"full divides a transformer block by block, and {config.model.title} models are not transformers. Use "
            "none",
        )
    if config.optimizer.no_fsdp_reason is not None:
        yield Problem(
            "optimizer.name",
            f"{config.optimizer.name} {config.optimizer.no_fsdp_reason}, but train.fsdp full gives it a part of "
            f"each parameter. Use adamw, adamw8bit or adamw_bf16, {none}",
        )
    yield from _step_rules(config)


def _step_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report options of the step that do not work with divided weights."""
    memory, train, none = config.memory, config.train, "or train.fsdp none"
    if memory.resident_blocks is not None:
        yield Problem(
            "memory.resident_blocks",
            f"{memory.resident_blocks} offloads blocks whose weights each process holds whole, but train.fsdp full "
            f"gathers them from all processes. Use null, {none}",
        )
    if memory.optimizer_in_backward:
        yield Problem(
            "memory.optimizer_in_backward",
            "true updates each parameter on its own, but train.fsdp full sums the gradients of a whole block. Use "
            f"false, {none}",
        )
    if train.reduce == "exact":
        yield Problem(
            "train.reduce",
            "exact sums whole gradients in each process, but train.fsdp full leaves it only a part of them. Use "
            f"fast, {none}",
        )
    if train.batch_size == "auto":
        yield Problem(
            "train.batch_size",
            "auto tries out a micro-batch, but with train.fsdp full a process that runs out of memory in it "
            f"would leave the others waiting for its weights. Use a number, {none}",
        )
    if config.speed.compile:
        yield Problem(
            "speed.compile",
            f"true compiles blocks whose weights stay where they are, but train.fsdp full gathers them for each "
            f"pass. Use false, {none}",
        )
    if config.text.trains:
        yield Problem(
            "text",
            "the text side trains whole in each process, but train.fsdp full divides all that trains. Use neither "
            f"text.lora nor text.embeddings, {none}",
        )
    if config.precision.settled == "fp16":
        yield Problem(
            "precision.compute",
            "fp16 undoes a step by what each process sees overflow, but with train.fsdp full it sees a part of the "
            f"gradients. Use bf16 or fp32, {none}",
        )
