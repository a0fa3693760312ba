"""Embed generated and real pictures with one encoder at a time; every embedding is stored as soon as it is computed.

Shapes: n pictures, d width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image

from simpletune.commands.evaluate.encoders import EncoderInfo
from simpletune.commands.evaluate.missing_images import Gallery
from simpletune.commands.evaluate.plan import EvaluatedWeights, EvaluationPlan
from simpletune.commands.evaluate.scores import Array
from simpletune.data.sources.image_files import decode_image
from simpletune.data.sources.source import SourceImage, UnusableImage
from simpletune.data.storage.cache import FileCache
from simpletune.stages.latent_cache import free_memory
from simpletune.system.checksums import sha256_of
from simpletune.system.console import progress
from simpletune.system.options import UserError

EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class ImageEmbeddings:
    """Embeddings of an evaluation by one encoder."""

    about: EncoderInfo
    generated: Mapping[EvaluatedWeights, Array]  # embeddings by point, one row per shot
    real: Array  # embeddings of the real pictures
    prompts: Array | None  # embeddings of the scored prompts, one row each; None if the encoder reads pictures only


def embed(plan: EvaluationPlan, gallery: Gallery, about: EncoderInfo) -> ImageEmbeddings:
    """Embed everything with one encoder; load it only if something is missing."""
    store = FileCache(gallery.folder / EMBEDDINGS / about.digest)
    device = plan.session.device
    jobs: dict[str, Callable[[], Image.Image]] = {}
    names: dict[EvaluatedWeights, list[str]] = {}
    for point in plan.points:
        keys = [plan.keys[point, shot] for shot in plan.shots]
        # The name includes a hash of the bytes, so that a redrawn picture is embedded again.
        names[point] = [f"picture {key} {sha256_of(gallery.file(key))}" for key in keys]
        jobs |= {name: partial(gallery.open, key) for name, key in zip(names[point], keys, strict=True)}
    real = [f"real {image.digest} {image.decoding.changes}".rstrip() for image in plan.real]
    jobs |= {name: partial(_open_real, image) for name, image in zip(real, plan.real, strict=True)}
    reads_prompts = about.kind.reads_prompts
    texts = [f"prompt {prompt.scored}" for prompt in plan.prompts.prompts] if reads_prompts else []
    missing = store.lacking([*jobs, *texts])
    if missing:
        with plan.session.stages.stage(f"load {about.title}"):
            encoder = about.load(device)
        unseen = [name for name in missing if name in jobs]
        with plan.session.stages.stage(about.title):
            if unseen:
                with progress(about.title, len(unseen), "pictures") as advance:
                    for name in unseen:
                        # One at a time: in a batch the last bits of an embedding would depend on its neighbours.
                        store.save(name, {"of": encoder.embed_images([jobs[name]()])[0]})
                        advance()
            for name in missing:
                if name not in jobs:
                    store.save(name, {"of": encoder.embed_prompts([name.removeprefix("prompt ")])[0]})
        del encoder
        free_memory(device)

    def load_rows(names: Sequence[str]) -> Array:  # [n, d]
        return np.asarray(torch.stack([store.load(name)["of"] for name in names]).numpy(), dtype=np.float64)

    generated = {point: load_rows(own) for point, own in names.items()}
    return ImageEmbeddings(about, generated, load_rows(real), load_rows(texts) if reads_prompts else None)


def _open_real(image: SourceImage) -> Image.Image:
    try:
        return decode_image(image)
    except (UnusableImage, OSError) as error:
        raise UserError(f"{image.name} {error}. Put it back; what is drawn already stays") from None
