"""Rules between the training method and other sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.system.options import Problem

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


def adapter_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check what the method requires of the model and the optimizer."""
    if config.adapter.needs_contexts and config.model.lora[0].names.contexts is None:
        yield Problem(
            "adapter.method",
            f"{config.adapter.method} changes what the attention to the prompt reads, but in {config.model.title} one "
            "attention reads prompt and picture together. Use adapter.method lora with adapter.targets "
            '["attn.add_k_proj", "attn.add_v_proj"], which changes the same keys and values',
        )
    if getattr(config.adapter, "b_lr_ratio", 1) != 1 and not config.optimizer.steps_in_backward:
        yield Problem(
            "adapter.b_lr_ratio",
            f"optimizer.name {config.optimizer.name} computes one learning rate from all gradients. Use b_lr_ratio 1, "
            "or another optimizer",
        )
    if getattr(config.adapter, "max_norm", None) is not None and config.optimizer.averages:
        yield Problem(
            "adapter.max_norm",
            f"optimizer.name {config.optimizer.name} averages the weights, and the limit would not hold for their "
            "average. Use max_norm null, or another optimizer",
        )
