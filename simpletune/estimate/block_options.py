"""The ways to checkpoint and offload blocks between which ``plan`` chooses."""

from __future__ import annotations

from simpletune.config.schema import TrainConfig
from simpletune.options import plural


def block_options(blocks: int, alone: bool = True, keeps: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    """List the ways to checkpoint and offload blocks, as (description, overrides), by decreasing memory.

    Args:
        blocks: their number.
        alone: whether recomputing feed-forward networks by themselves saves time.
        keeps: whether checkpointed blocks may keep the output of attention.
    """
    half = max(1, blocks // 2)
    some, every = f"{half} of {plural(blocks, 'block')} checkpointed", "every block checkpointed"

    def option(
        about: str, checkpointing: str | int, resident: str | int = "null", offload: str = "false", keep: str = "none"
    ) -> tuple[str, tuple[str, ...]]:
        return about, (
            f"memory.checkpointing={checkpointing}",
            f"memory.keep_attention={keep}",
            f"memory.feed_forward={'auto' if checkpointing == 'none' else 'alone' if alone else 'block'}",
            f"memory.resident_blocks={resident}",
            f"memory.offload_checkpoint_inputs={offload}",
        )

    keeping = [
        option(f"{some}, attention kept", half, keep="all"),
        option(f"{every}, attention kept", "all", keep="all"),
    ]
    return [
        option("all activations kept", "none"),
        *(keeping if keeps else [option(some, half)]),
        option(every, "all"),
        option(f"{every}, their inputs on the host", "all", offload="true"),
        option(f"{blocks - half} of {plural(blocks, 'block')} streamed", "all", half),
        option("every block streamed", "all", 0),
        option("every block streamed, checkpoint inputs on the host", "all", 0, "true"),
    ]


def may_keep_attention(config: TrainConfig) -> bool:
    """Whether checkpointed blocks may keep the output of attention."""
    return config.speed.attention != "math" and not config.speed.compile
