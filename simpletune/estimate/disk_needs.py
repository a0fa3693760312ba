"""Compute what a run writes to disk, from shapes and counts alone, and check it against the free space."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simpletune.config.prior import ClassImages
from simpletune.config.schema import ResolvedConfig, TrainConfig, profile_folder, run_folder
from simpletune.data.plan import Plan
from simpletune.data.storage.cache import crop_key
from simpletune.engine.quant.precision import ITEM
from simpletune.models.text.encoder import groups_of
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.stages.stream_plan import StreamPlan
from simpletune.system.console import say
from simpletune.system.disk import DiskFull, existing_parent, format_bytes, free_disk_bytes

LATENT_BYTES = 4  # latents are cached in fp32
PNG_BYTES = 3  # at most, bytes per pixel
HEADERS = 2**16  # bytes: lower bound of a checkpoint's headers, configuration and manifest
TRIED = 32  # rows of a stream examined to estimate how much of it is cached
CLOSE = 0.8  # share of the free space; warn above it


class DataCounts(NamedTuple):
    """Counts of a run's data."""

    images: int
    prompts: int
    """Distinct prompts to encode, over all variants of the pictures."""
    pixels: int
    """Pixels of all crops to encode."""
    samples: int
    """Samples in an epoch."""
    steps: int = 0
    """Steps in an epoch, counting partly filled micro-batches; 0: unknown."""

    @classmethod
    def from_plan(cls, config: TrainConfig, plan: Plan, start: int = 0) -> DataCounts:
        """Count a plan's data; of a stream, what the steps from ``start`` on use, with all of its prompts distinct."""
        if isinstance(plan, StreamPlan):
            used = plan.used_variants(start, config.steps(plan.steps_per_epoch)) // plan.samples.source.variants
            areas = np.array([width * height for width, height in plan.samples.sizes], dtype=np.int64)
            entries = 1 + plan.inpaints  # with a hole of its own for each; whole images share one
            images, pixels = plan.images(), int(areas[plan.samples.bucket[used]].sum()) * entries
            prompts = len(used) if plan.samples.source.prompt is None else 1
        else:
            views = {crop_key(crop): view for view in plan.views() for crop in view.cached}
            pixels, prompts = sum(math.prod(view.bucket) for view in views.values()), len(plan.captions())
            both = [*plan.samples, *plan.held_out] if views else []
            images = len({(sample.image.source, sample.image.name) for sample in both})
        return cls(images, prompts, pixels, len(plan.samples), plan.steps_per_epoch)

    @classmethod
    def from_uncached(cls, config: TrainConfig, plan: Plan) -> DataCounts:
        """Count only the prompts and pixels that are not cached yet, for which folders must be resolved."""
        prompts, pixels = _count_to_encode(config, plan)
        return cls.from_plan(config, plan)._replace(prompts=prompts, pixels=pixels)


NO_DATA = DataCounts(0, 0, 0, 0)


def require_room(config: ResolvedConfig, plan: Plan, start: int = 0, force: bool = False) -> None:
    """Refuse a run that needs more disk than is free; warn if it is close.

    Args:
        config: with folders resolved.
        start: steps already done; their checkpoints free space as they are replaced.
        force: warn instead of refusing.

    Raises:
        DiskFull: lists the space needed, by use, and the free space.
    """
    by_disk: dict[int, list[tuple[str, Path, int]]] = defaultdict(list)
    for what, folder, size in disk_needs(config, plan, start):
        by_disk[existing_parent(folder).stat().st_dev].append((what, folder, size))
    lacking = []
    for needs in by_disk.values():
        place, wanted = existing_parent(needs[0][1]), sum(size for _, _, size in needs)
        free = free_disk_bytes(place)
        text = (
            f"{format_bytes(wanted)} ({', '.join(f'{what} {format_bytes(size)}' for what, _, size in needs)}) "
            f"and {format_bytes(free)} are free on the disk of {place}"
        )
        if wanted > free:
            lacking.append(text)
        elif wanted > CLOSE * free:
            say(f"warning this run writes about {text}: the disk will be nearly full")
    if lacking and force:
        say(f"warning this run writes about {'; '.join(lacking)}: the disk may fill up during the run (--force)")
    elif lacking:
        raise DiskFull(
            f"disk: this run writes about {'; '.join(lacking)}. Free some space, keep fewer checkpoints "
            "(checkpoint.keep_last, keep_every), or move output.runs and output.cache to another disk. "
            "--force starts it anyway"
        )
    traces = free_disk_bytes(profile_folder(config))
    if config.profile.max_traces and traces < config.profile.max_mb * 10**6:
        say(
            f"warning {format_bytes(traces)} are free for profiler traces: writing may fail. "
            "profile.max_traces=0 skips it"
        )


def disk_needs(
    config: TrainConfig, plan: Plan | None = None, start: int = 0, counts: DataCounts = NO_DATA
) -> Iterator[tuple[str, Path, int]]:
    """Yield what a run will write: the folder and the bytes. Leaves out the quantised base, which is cached only if
    there is space to spare.

    Args:
        config: configuration of the run; with a plan, folders must be resolved.
        plan: plan of the run; excludes what is already cached. None: do not read the data.
        start: steps already done; their checkpoints free space as they are replaced.
        counts: counts of the data, used without a plan; all of it counts as not cached.
    """
    run, cache = run_folder(config), config.output.cache_folder
    one, result = checkpoint_bytes(config)
    yield "checkpoints", run, _count_new_checkpoints(config, plan, start, counts.samples) * one
    yield "result", run, result
    prompts, pixels = (counts.prompts, counts.pixels) if plan is None else _count_to_encode(config, plan, start)
    prompt = bytes_of_prompt(config)
    autoencoder = config.model.autoencoder
    place, per_place = autoencoder.downsampling**2, autoencoder.channels * LATENT_BYTES  # its pixels and bytes
    if config.output.place.url is None:
        yield "cached pictures", cache, pixels // place * per_place
        yield "cached prompts", cache, prompts * prompt
    else:
        read = counts if plan is None else DataCounts.from_plan(config, plan, start)
        whole = read.pixels // place * per_place + read.prompts * prompt
        yield "local part of the cache", cache, min(config.output.place.limit, whole)
    if plan is None and isinstance(config.prior, ClassImages):
        yield "class pictures", cache, config.prior.count * config.resolution**2 * PNG_BYTES


def bytes_of_prompt(config: TrainConfig) -> int:
    """Return an upper bound on one prompt's embeddings; packed ones are 8-bit numbers with a scale for each group."""
    width, wide = config.model.text.width, ITEM[config.precision.encoder_type]
    packed = sum(encoder.length or 0 for encoder in config.model.text.encoders if encoder.packed)  # tokens
    whole = (config.model.text.tokens - packed) * width + config.model.text.pooled_width
    return whole * wide + packed * (width + 4 * groups_of(width))


def _count_new_checkpoints(config: TrainConfig, plan: Plan | None, start: int, samples: int) -> int:
    """Return the maximum number of checkpoints that the run's folder will hold beyond those that it holds now."""
    option, best = config.checkpoint, config.validation.split is not None
    if plan is None and config.train.epochs is not None and option.keep_last != "all":
        if option.keep_every is None:
            return option.keep_last + 1 + best  # the number of steps per epoch is unknown
    batch = config.train.micro_batch * config.train.accumulation
    counted = math.ceil(samples / batch)
    steps = config.steps(max(1, counted) if plan is None else plan.steps_per_epoch)
    there = [step for step, _ in list_checkpoints(run_folder(config)) if step <= start] if start else []
    every = option.every or steps
    due = [*range(start - start % every + every, steps, every), *([steps] if start < steps else [])]
    return max(0, option.most_on_disk([*there, *due], best) - len(option.steps_to_keep(there)))


def _count_to_encode(config: TrainConfig, plan: Plan, start: int = 0) -> tuple[int, int]:
    """Return the number of prompts that an encoder still has to encode, and of pixels of crops that are not cached."""
    from simpletune.stages.encode import needed_prompts
    from simpletune.stages.latent_cache import LatentCache
    from simpletune.stages.prepared import validation_requests
    from simpletune.stages.text_cache import TextCache

    dtype, place = config.precision.encoder_dtype(), config.output.place
    latents = LatentCache.from_config(config, place).cache
    if isinstance(plan, StreamPlan):  # estimated from a few of the crops
        used = plan.used_variants(start, config.steps(plan.steps_per_epoch))
        some = used[:: max(1, len(used) // TRIED)]
        pairs = zip(*(part.tolist() for part in divmod(some, plan.samples.source.variants)), strict=True)
        samples = plan.samples.without_captions()
        keys = [crop_key(crop) for row, variant in pairs for crop in plan.view(samples[row], variant).cached]
        lacking = sum(key not in latents for key in keys) / max(1, len(keys))
        counts = DataCounts.from_plan(config, plan, start)
        return math.ceil(counts.prompts * lacking), math.ceil(counts.pixels * lacking)
    views = {crop_key(crop): view for view in plan.views() for crop in view.cached}
    pixels = sum(math.prod(view.bucket) for key, view in views.items() if key not in latents)
    text = TextCache(config.model, dtype, place, config.text)
    prompts = set(needed_prompts(config, plan, validation_requests(config, plan)))
    expanded = [text.tokens.expanded(prompt) for prompt in prompts]
    return sum(any(key not in cache for cache in text.caches) for key in expanded), pixels


def checkpoint_bytes(config: TrainConfig) -> tuple[int, int]:
    """Return the bytes of one checkpoint and of the result; folders must be resolved."""
    adapter = config.adapter
    shapes = config.model.architecture.known_shapes()
    count = adapter.trainable(shapes)
    wide = ITEM[config.precision.compute_type]
    each = {"fp32": 4, "bf16": 2}.get(getattr(adapter, "dtype", ""), wide)
    trained = count * each
    state = int(count * config.optimizer.bytes_per_parameter)
    average = 4 * count if config.ema or config.optimizer.averages else 0
    text = config.text.trainable(config.model)  # in fp32, apart from T5's word pieces
    trained, state = trained + 4 * text, state + int(text * config.optimizer.bytes_per_parameter)
    average += 4 * text if config.ema or config.optimizer.averages else 0
    numbers = sum(math.prod(shape) for shape in shapes.values())
    result = numbers * wide if adapter.trains_base else adapter.exported(shapes) * each + 4 * text
    return trained + state + average + (result if adapter.exports_to_checkpoints else 0) + HEADERS, result
