"""What a run writes to its disks, from shapes and counts alone: for estimates, and against what is free before it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from simpletune.config.schema import TrainConfig, profile_folder, run_folder
from simpletune.data.cache import view_key
from simpletune.data.plan import Plan
from simpletune.models.sd3_shapes import parameter_shapes
from simpletune.pipeline.encode import LatentCache, TextCache, prompts_of, validation_requests
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.system.console import say
from simpletune.system.disk import DiskFull, existing, free_bytes, in_words

LATENT_BYTES = 4  # latents are kept in fp32
HEADERS = 2**16  # bytes: of a checkpoint's names, configuration and manifest, at least
CLOSE = 0.8  # of what is free: more is worth a word


class Need(NamedTuple):
    """Something that a run writes."""

    what: str
    folder: Path
    bytes: int


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
    for need in disk_needs(config, plan, start):
        by_disk[existing(need.folder).stat().st_dev].append(need)
    lacking = []
    for needs in by_disk.values():
        place, wanted = existing(needs[0].folder), sum(need.bytes for need in needs)
        free = free_bytes(place)
        text = (
            f"{in_words(wanted)} ({', '.join(f'{need.what} {in_words(need.bytes)}' for need in needs)}) "
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
            f"disk: this run writes about {'; '.join(lacking)}. Make room, keep fewer checkpoints "
            "(checkpoint.keep_last, keep_every), or set output.runs and output.cache to another disk. --force starts "
            "it all the same"
        )
    traces = free_bytes(profile_folder(config))
    if config.profile.max_traces and traces < config.profile.max_mb * 10**6:
        say(f"warning {in_words(traces)} are free for profiler traces: they may fail; profile.max_traces=0")


def disk_needs(config: TrainConfig, plan: Plan | None = None, start: int = 0, pictures: int = 0) -> Iterator[Need]:
    """What a run will write, but for the quantised base: that one is kept only where there is room to spare.

    Args:
        config: of the run; with a plan its folders are resolved.
        plan: of the run, by which what is cached already is left out; None: the data is not read.
        start: steps done before; their checkpoints make room as they are replaced.
        pictures: without a plan, how many the data set has: each is taken as a square with a caption of its own.
    """
    run, cache = run_folder(config), Path(config.output.cache)
    one, result = checkpoint_bytes(config)
    yield Need("checkpoints", run, _more_checkpoints(config, plan, start, pictures) * one)
    yield Need("result", run, result)
    if plan is None:
        pixels, prompts = pictures * config.data.resolution**2, pictures
    else:
        pixels, prompts = _pixels_to_encode(config, plan), _prompts_to_encode(config, plan)
    shapes = config.model.known_config()
    prompt = config.model.text_tokens * shapes["joint_attention_dim"] * config.precision.encoder_dtype().itemsize
    yield Need("cached pictures", cache, pixels // 64 * shapes["in_channels"] * LATENT_BYTES)
    yield Need("cached prompts", cache, prompts * prompt)


def _more_checkpoints(config: TrainConfig, plan: Plan | None, start: int, pictures: int) -> int:
    """How many checkpoints a run's folder holds at most, beyond those that it holds now."""
    option = config.checkpoint
    if plan is None and config.train.epochs is not None and option.keep_last != "all":
        if option.keep_every is None:
            return option.keep_last + 1  # how many steps an epoch has is not known
    batch = config.train.batch_size * config.train.gradient_accumulation
    counted = math.ceil(pictures * config.data.repeats / batch)
    steps = config.steps(max(1, counted) if plan is None else plan.steps_per_epoch)
    there = [step for step, _ in list_checkpoints(run_folder(config)) if step <= start] if start else []
    every = option.every or steps
    due = [*range(start - start % every + every, steps, every), *([steps] if start < steps else [])]
    return max(0, option.most_at_once([*there, *due]) - len(option.kept(there)))


def _pixels_to_encode(config: TrainConfig, plan: Plan) -> int:
    """Pixels of the cuts whose latents are not in the cache."""
    dtype, tile = config.precision.encoder_dtype(), config.memory.vae_tile
    latents = LatentCache(config.model, dtype, Path(config.output.cache), tile)
    views = {view_key(view): view for view in plan.views()}
    return sum(math.prod(view.bucket) for key, view in views.items() if key not in latents.cache)


def _prompts_to_encode(config: TrainConfig, plan: Plan) -> int:
    """How many prompts at least one encoder has to encode."""
    text = TextCache(config.model, config.precision.encoder_dtype(), Path(config.output.cache))
    prompts = set(prompts_of(plan, validation_requests(config, plan)))
    return sum(any(prompt not in cache for cache in text.caches.values()) for prompt in prompts)


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
