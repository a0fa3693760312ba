"""Check what recomputing only parts of blocks requires of other options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.system.options import Problem

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


def recompute_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report parts of blocks that cannot be kept or recomputed separately."""
    memory = config.memory
    keeps = memory.keep_attention not in ("auto", "none")
    if keeps and config.speed.attention == "math":
        yield Problem(
            "memory.keep_attention",
            f"{memory.keep_attention} keeps what an attention kernel returns, and speed.attention math has none. Use "
            "speed.attention auto, or keep_attention none",
        )
    if keeps and config.speed.compile:
        yield Problem(
            "memory.keep_attention",
            f"{memory.keep_attention} with speed.compile: a compiled block does not show its attention. Use "
            "keep_attention none, or speed.compile false",
        )
    field, value = _by_itself(config)
    if field is not None and config.speed.compile:
        yield Problem(
            f"memory.{field}",
            f"{value} with speed.compile: a compiled block is recomputed as a whole. Use {_instead(field)}, or "
            "speed.compile false",
        )
    if field is not None and config.precision.settled == "fp16":
        yield Problem(
            f"memory.{field}",
            f"{value} with products in fp16: a block that overflows uses wider weights during its passes, which a "
            f"network recomputed separately would miss. Use {_instead(field)}, or precision.compute bf16",
        )


def _by_itself(config: TrainConfig) -> tuple[str | None, object]:
    """Return the field of ``memory`` that recomputes feed-forward networks separately, and its value."""
    memory = config.memory
    if memory.checkpointing == "feed_forward":
        return "checkpointing", memory.checkpointing
    return (None, None) if memory.feed_forward in ("auto", "block") else ("feed_forward", memory.feed_forward)


def _instead(field: str) -> str:
    return "checkpointing all" if field == "checkpointing" else "feed_forward block"


def may_recompute_alone(config: TrainConfig) -> bool:
    """Whether recomputing feed-forward networks separately saves time, because nothing needs their outputs again.

    Args:
        config: configuration with a known model and resolved demo names.
    """
    if not config.model.ends_with_feed_forward or config.speed.compile or config.precision.settled == "fp16":
        return False
    if config.adapter.trains_base or config.text.resident(config.model.clip_encoders):
        return False
    return not config.trained_modulation(config.model.known_shapes())
