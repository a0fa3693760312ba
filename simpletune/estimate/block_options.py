"""Ways to checkpoint and offload blocks, among which ``plan`` chooses."""

from __future__ import annotations

from simpletune.config.schema import TrainConfig
from simpletune.system.options import plural

TILE = 1024  # tokens


def block_options(blocks: int, alone: bool = True, keeps: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    """List the ways to checkpoint and offload blocks, as (description, overrides), by decreasing memory.

    Keeping attention's output in host memory costs less time than recomputing it, so only the last ways recompute it.

    Args:
        blocks: number of blocks.
        alone: whether recomputing feed-forward networks separately saves time.
        keeps: whether checkpointed blocks may keep attention's output.
    """
    half = max(1, blocks // 2)
    some, every = f"{half} of {plural(blocks, 'block')} checkpointed", "every block checkpointed"
    some_offloaded, every_offloaded = f"{blocks - half} of {plural(blocks, 'block')} offloaded", "every block offloaded"
    network = "alone" if alone else "auto"

    def option(
        about: str, checkpointing: str | int, resident: str | int = "null", host: bool = False, keep: bool = keeps
    ) -> tuple[str, tuple[str, ...]]:
        return about, (
            f"memory.checkpointing={checkpointing}",
            f"memory.keep_attention={'all' if keep else 'auto'}",
            f"memory.feed_forward={'auto' if checkpointing == 'none' else network}",
            f"memory.resident_blocks={resident}",
            f"memory.offload_checkpoint_inputs={str(host).lower()}",
        )

    kept = option("all activations kept", "none", keep=False)
    if not keeps:
        return [
            kept,
            option(some, half),
            option(every, "all"),
            option(f"{every}, their inputs on the host", "all", host=True),
            option(some_offloaded, "all", half),
            option(every_offloaded, "all", 0),
            option(f"{every_offloaded}, checkpoint inputs on the host", "all", 0, host=True),
        ]
    with_host = "inputs and attention's outputs on the host"
    about, tiled = option(f"{every_offloaded}, inputs on the host", "all", 0, host=True, keep=False)
    if alone:
        about += ", feed-forward in tiles"
        tiled = tuple(each.replace("feed_forward=alone", f"feed_forward={TILE}") for each in tiled)
    return [
        kept,
        option(f"{some}, attention kept", half),
        option(f"{every}, attention kept", "all"),
        option(f"{every}, {with_host}", "all", host=True),
        option(f"{some_offloaded}, {with_host}", "all", half, host=True),
        option(f"{every_offloaded}, {with_host}", "all", 0, host=True),
        (about, tiled),
    ]


def may_keep_attention(config: TrainConfig) -> bool:
    """Whether checkpointed blocks may keep the output of attention."""
    return config.speed.attention != "math" and not config.speed.compile
