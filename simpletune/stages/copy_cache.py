"""Copy what a run needs from another cache, in either form, instead of encoding it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from simpletune.config.output import Output
from simpletune.config.schema import TrainConfig
from simpletune.data.plan import Plan
from simpletune.data.storage.cache import Cache, crop_key
from simpletune.data.storage.claims import ALONE, KeyRange
from simpletune.data.storage.place import CachePlace
from simpletune.stages.encode import needed_prompts
from simpletune.stages.latent_cache import LatentCache
from simpletune.stages.prepared import validation_requests
from simpletune.stages.text_cache import TextCache
from simpletune.system.console import progress, say
from simpletune.system.options import UserError, plural
from simpletune.system.signals import poll

TOGETHER = 64  # samples claimed together


def copy_cache(config: TrainConfig, plan: Plan, source: str, share: KeyRange = ALONE) -> int:
    """Copy the prompt embeddings, and the latents with their masks, that a run lacks.

    Args:
        config: the configuration, folders resolved.
        plan: the run's plan.
        source: the folder or the URL of another cache.
        share: what this process copies first, if others fill the cache too.

    Returns:
        The number of samples that this process has copied.

    Raises:
        UserError: the source does not exist or cannot be read, or the data is a stream.
    """
    if config.pictures.streamed:
        raise UserError(
            "--from: data.source=stream lists no samples to copy. Leave --from out, and encode them; or point "
            "output.cache at the other cache itself"
        )
    places = [Output(cache=source).place]
    if places[0].url is None:
        if not Path(source).is_dir():
            raise UserError(f"--from: {source} is not a folder. Give the folder or the URL of a cache")
        places.append(Output(cache=source, cache_form="shards").place)  # a folder may have either form
    own = list(_parts(config, plan, config.output.place))  # first: checksums of the model are kept there, not in others
    copied, others = 0, [list(_parts(config, plan, place)) for place in places]
    for number, (cache, keys) in enumerate(own):
        donors = [parts[number][0] for parts in others]
        lacking = cache.lacking(keys, share)
        known = {key: donor for donor in reversed(donors) for key in lacking if key in donor}
        with progress(f"copy  {cache.folder.name[:24]}", share.count(len(known)), "samples") as advance:
            for key in (key for keys in cache.claim(known, share, TOGETHER) for key in keys):
                cache.save(key, known[key].load(key))
                copied += 1
                advance()
                poll()
    say(f"copied  {plural(copied, 'sample')} from {source}")
    return copied


def _parts(config: TrainConfig, plan: Plan, place: CachePlace) -> Iterator[tuple[Cache, Iterable[str]]]:
    """List the caches of a run in one place, always in the same order, with the keys that it needs of each."""
    dtype = config.precision.encoder_dtype()
    text = TextCache(config.model, dtype, place, config.text)
    prompts = needed_prompts(config, plan, validation_requests(config, plan))
    for cache in text.caches:
        yield cache, map(text.tokens.expanded, prompts)
    latents = LatentCache.from_config(config, place)
    yield latents.cache, (crop_key(crop) for view in plan.views() for crop in view.cached)
