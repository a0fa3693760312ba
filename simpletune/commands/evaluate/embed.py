"""Embed drawn and real pictures with one encoder at a time; every embedding is stored as soon as it is computed.

Shapes: n pictures, d width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image

from simpletune.commands.evaluate.encoders.encoder import EncoderInfo, ImageEncoder
from simpletune.commands.evaluate.encoders.loading import class_of, load_encoder
from simpletune.commands.evaluate.generate import Gallery
from simpletune.commands.evaluate.plan import EvaluatedWeights, EvaluationPlan, open_picture
from simpletune.commands.evaluate.scores import Array
from simpletune.data.storage.cache import FileCache
from simpletune.stages.latent_cache import free_memory
from simpletune.system.checksums import sha256_of
from simpletune.system.console import progress

EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class PictureEmbeddings:
    """Embeddings of an evaluation by one encoder.

    Args:
        about: the encoder.
        drawn: embeddings by point, one row per shot.
        real: embeddings of the real pictures.
        prompts: embeddings of the scored prompts, one row each; None if the encoder reads pictures only.
    """

    about: EncoderInfo
    drawn: Mapping[EvaluatedWeights, Array]
    real: Array
    prompts: Array | None


def embed(plan: EvaluationPlan, gallery: Gallery, about: EncoderInfo) -> PictureEmbeddings:
    """Embed everything with one encoder; load it only if something is missing.

    Raises:
        UserError: the encoder is damaged, or a picture is missing.
    """
    store = FileCache(gallery.folder / EMBEDDINGS / about.digest)
    device = plan.session.device
    drawn = {point: [plan.key(point, shot) for shot in plan.shots] for point in plan.points}
    jobs: dict[str, Callable[[], Image.Image]] = {}
    names: dict[EvaluatedWeights, list[str]] = {}
    for point, keys in drawn.items():
        # The name includes a hash of the bytes, so that a redrawn picture is embedded again.
        names[point] = [f"picture {key} {sha256_of(gallery.file(key))}" for key in keys]
        jobs |= {name: partial(gallery.open, key) for name, key in zip(names[point], keys, strict=True)}
    real = [f"real {picture.digest}" for picture in plan.real]
    jobs |= {name: partial(open_picture, picture) for name, picture in zip(real, plan.real, strict=True)}
    texts = [f"prompt {prompt.scored}" for prompt in plan.prompts.prompts]
    missing = store.lacking([*jobs, *texts])
    encoder: ImageEncoder | None = None
    if any(name in jobs for name in missing) or (missing and reads_prompts(about)):
        with plan.session.stages.stage(f"load {about.title}"):
            encoder = load_encoder(about, device)
    if encoder is not None:
        with plan.session.stages.stage(about.title):
            _fill(store, encoder, {name: jobs[name] for name in missing if name in jobs})
            for name in (name for name in missing if name not in jobs and encoder.reads_prompts):
                store.save(name, {"of": encoder.of_prompts([name.removeprefix("prompt ")])[0]})
        del encoder
        free_memory(device)
    return PictureEmbeddings(
        about,
        {point: _stacked(store, own) for point, own in names.items()},
        _stacked(store, real),
        _stacked(store, texts) if reads_prompts(about) else None,
    )


def reads_prompts(about: EncoderInfo) -> bool:
    """Whether an encoder reads prompts, without loading it."""
    return class_of(about).reads_prompts


def _fill(store: FileCache, encoder: ImageEncoder, jobs: Mapping[str, Callable[[], Image.Image]]) -> None:
    """Embed pictures one at a time: in a batch the last bits of an embedding would depend on its neighbours."""
    if not jobs:
        return
    with progress(encoder.about.title, len(jobs), "pictures") as advance:
        for name, read in jobs.items():
            store.save(name, {"of": encoder.of_pictures([read()])[0]})
            advance()


def _stacked(store: FileCache, names: Sequence[str]) -> Array:
    """Read embeddings, [n, d]."""
    return np.asarray(torch.stack([store.load(name)["of"] for name in names]).numpy(), dtype=np.float64)
