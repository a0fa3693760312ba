"""The space that a run will need on its disks, from shapes and counts alone, against what is free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from simpletune.config.schema import TrainConfig, profile_folder, run_folder
from simpletune.data.cache import view_key
from simpletune.data.plan import Plan
from simpletune.models.sd3_shapes import parameter_shapes
from simpletune.pipeline.encode import LatentCache, TextCache, prompts_of, validation_requests
from simpletune.system.console import say
from simpletune.system.disk import DiskFull, existing, free_bytes, in_words, size_of

LATENT_BYTES = 4  # latents are kept in fp32
HEADERS = 2**16  # bytes: of a checkpoint's names, configuration and manifest, at least
CLOSE = 0.8  # of what is free: more is worth a word

Need = tuple[str, Path, int]  # what, where, bytes


def require_room(config: TrainConfig, plan: Plan, start: int = 0, force: bool = False) -> None:
    """Refuse a run that its disks cannot hold; say so where it will be close.

    Args:
        config: with folders resolved.
        plan: of the run.
        start: steps done before; its checkpoints make room as they are replaced.
        force: say it, and do not refuse.

    Raises:
        DiskFull: with what is needed, what for, and what is free.
    """
    by_disk: dict[int, list[Need]] = defaultdict(list)
    for need in needs(config, plan, start):
        by_disk[existing(need[1]).stat().st_dev].append(need)
    lacking = []
    for found in by_disk.values():
        place, wanted = existing(found[0][1]), sum(size for _, _, size in found)
        free = free_bytes(place)
        text = (
            f"{in_words(wanted)} ({', '.join(f'{what} {in_words(size)}' for what, _, size in found)}) "
            f"and {in_words(free)} are free on the disk of {place}"
        )
        if wanted > free:
            lacking.append(text)
        elif wanted > CLOSE * free:
            say(f"warning this run writes about {text}: that is close")
    if lacking and force:
        say(f"warning this run writes about {'; '.join(lacking)}: it may stop with a full disk (--force)")
    elif lacking:
        raise DiskFull(
            f"disk: this run writes about {'; '.join(lacking)}. Make room, use a smaller checkpoint.keep_last, or set "
            "output.runs and output.cache to another disk. --force starts it all the same"
        )
    traces = free_bytes(profile_folder(config))
    if config.profile.max_traces and traces < config.profile.max_mb * 10**6:
        say(f"warning {in_words(traces)} are free for profiler traces: they may fail; profile.max_traces=0")


def needs(config: TrainConfig, plan: Plan, start: int = 0) -> Iterator[Need]:
    """What a run will write, where, and how large."""
    run, steps = run_folder(config), config.steps(plan.steps_per_epoch)
    one, result = checkpoint_bytes(config)
    every = config.checkpoint.every
    coming = 1 + ((steps - 1) // every - start // every if every else 0)
    at_once = min(config.checkpoint.keep_last + 1, coming)  # the new one is whole before the oldest goes
    there = size_of(run / "checkpoints") if start else 0
    yield "checkpoints", run, max(0, at_once * one - there)
    yield "the result", run, result
    cache = Path(config.output.cache)
    dtype = config.precision.encoder_dtype()
    text, latents = (
        TextCache(config.model, dtype, cache),
        LatentCache(config.model, dtype, cache, config.memory.vae_tile),
    )
    views = {view_key(view): view for view in plan.views()}
    missing = [view for key, view in views.items() if key not in latents.cache]
    channels = config.model.known_config()["in_channels"]
    pixels = sum(math.prod(view.bucket) for view in missing)
    yield "cached pictures", cache, pixels // 64 * channels * LATENT_BYTES
    width = config.model.known_config()["joint_attention_dim"] * dtype.itemsize
    many = len(_missing_prompts(text, prompts_of(plan, validation_requests(config, plan))))
    yield "cached prompts", cache, many * config.model.text_tokens * width


def _missing_prompts(text: TextCache, prompts: Sequence[str]) -> set[str]:
    return {prompt for prompt in prompts if any(prompt not in cache for cache in text.caches.values())}


def checkpoint_bytes(config: TrainConfig) -> tuple[int, int]:
    """Bytes of one checkpoint, and of the result.

    Args:
        config: with folders resolved.
    """
    adapter = config.adapter
    shapes = parameter_shapes(config.model.known_config())
    count = adapter.trainable(shapes)
    wide = config.precision.base_dtype().itemsize
    trained = count * ({"fp32": 4, "bf16": 2}.get(getattr(adapter, "dtype", ""), wide))
    state = int(count * config.optimizer.bytes_per_parameter)
    average = 4 * count if config.ema else 0
    result = sum(math.prod(shape) for shape in shapes.values()) * wide if adapter.trains_base else trained
    return trained + state + average + (result if adapter.exports_to_checkpoints else 0) + HEADERS, result
