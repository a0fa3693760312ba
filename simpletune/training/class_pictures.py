"""Draw pictures of a class with the base before training, keep them in the cache, and add them to the data."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from simpletune.config.modulation import settle_modulation
from simpletune.config.schema import TrainConfig, cache_of_bases
from simpletune.data.folder import Folder
from simpletune.data.prompts import prompt_of
from simpletune.data.several import Several, scan_sources, subjects
from simpletune.models.transformer import device_of, units_of
from simpletune.options import plural
from simpletune.pipeline.encode import TextCache
from simpletune.pipeline.latent_cache import free_memory
from simpletune.pipeline.load import load_base, modulation_of
from simpletune.pipeline.png import save_png
from simpletune.pipeline.sample import Request, Sampler, draw
from simpletune.prior import ClassPictures
from simpletune.step.attention import attention_by
from simpletune.system.atomic import atomic_file, write_text
from simpletune.system.console import progress, say, silent
from simpletune.system.stage_timer import StageTimer

STAGE = "class"
VERSION = 1  # increment when the same settings draw other pictures
TOGETHER = 8  # pictures whose latents wait for the autoencoder


def with_class_pictures(config: TrainConfig, accelerator: Accelerator, stages: StageTimer) -> TrainConfig:
    """Draw the class pictures that are missing, and add all of them to the data as a source for regularization.

    The main process draws; the others wait for it. Without ``prior.method: class_pictures`` nothing changes.

    Args:
        config: configuration with folders resolved.
        accelerator: provides the processes and the device.
        stages: records the time and memory of the stage ``class``.
    """
    prior = config.prior
    if not isinstance(prior, ClassPictures):
        return config
    requests = requests_of(config, prior)
    folder = folder_of(config, requests)
    with accelerator.main_process_first():
        folder.mkdir(parents=True, exist_ok=True)
        link_known(folder, requests)
        missing = [request for request in requests if not file_of(folder, request).is_file()]
        kept = len(requests) - len(missing)
        if accelerator.is_main_process:
            pictures = plural(prior.count, "class picture")
            say(f"class   {pictures} of {prior.prompt!r}: {kept} kept in {folder}, {len(missing)} to draw")
        if missing:
            with stages.stage(STAGE):
                draw_missing(config, missing, folder, accelerator)
    return config.model_copy(update={"data": with_source(config, prior, folder)})


def requests_of(config: TrainConfig, prior: ClassPictures) -> list[Request]:
    """The pictures to draw: squares of the subject's largest resolution, each with a seed of its own."""
    side = max(source.resolution for source in subjects(config.data))
    negative, prompts = config.validation.negative_prompt, prompts_of_class(config, prior)
    return [
        Request(
            prompts[(prior.seed + number) % len(prompts)],
            prior.seed + number,
            negative,
            side,
            side,
            prior.steps,
            prior.guidance,
        )
        for number in range(prior.count)
    ]


def prompts_of_class(config: TrainConfig, prior: ClassPictures) -> list[str]:
    """The class prompt, or with a trigger those of the subject's captions."""
    if prior.trigger is None:
        return [prior.prompt]
    data = config.data
    pictures = [picture for picture in scan_sources(data).pictures if not data.members[picture.source].regularization]
    captions = [prompt_of(picture, data.members[picture.source], config.train.seed, 0) for picture in pictures]
    return list(dict.fromkeys(prior.class_prompt(caption) for caption in captions)) or [prior.prompt]


def file_of(folder: Path, request: Request) -> Path:
    """The file of a class picture, named by its seed."""
    return folder / f"seed-{request.seed:010d}.png"


def folder_of(config: TrainConfig, requests: list[Request]) -> Path:
    """The folder of exactly these pictures, below one for everything that they depend on but their seeds."""
    model, precision, first = config.model, config.precision, requests[0]
    prompts = model.prompts(precision.encoder_dtype())
    depends = {
        "base": [
            model.part(model.denoiser).fingerprint(),
            model.init,
            config.train.seed if model.init == "random" else 0,
        ],
        "encoders": [prompts.fingerprint(encoder) for encoder in prompts.encoders],
        "vae": model.vae_fingerprint(),
        "weights": precision.weights,
        "request": [
            sorted({request.prompt for request in requests}),
            first.negative_prompt,
            first.width,
            first.height,
            first.steps,
            first.guidance,
        ],
        "version": VERSION,
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
    return config.output.cache_folder / "class" / key / f"{first.seed}-{requests[-1].seed}"


def link_known(folder: Path, requests: list[Request]) -> None:
    """Link pictures that runs with another number of them, or with other seeds, have drawn."""
    for request in requests:
        place = file_of(folder, request)
        known = [sibling / place.name for sibling in sorted(folder.parent.iterdir()) if sibling != folder]
        drawn = next((file for file in known if file.is_file()), None)
        if drawn is not None and not place.is_file():
            for source in (drawn.with_suffix(".txt"), drawn):
                with atomic_file(place.with_suffix(source.suffix), shared=True) as part:
                    os.link(source, part)


def draw_missing(config: TrainConfig, requests: list[Request], folder: Path, accelerator: Accelerator) -> None:
    """Draw pictures with the base, with the memory levers of training, and free it."""
    device, model = accelerator.device, config.model
    text = TextCache(model, config.precision.encoder_dtype(), config.output.place)
    text.fill([*(request.prompt for request in requests), requests[0].negative_prompt], device)
    config = for_drawing(config, on_host=device.type == "cpu")
    sizes = {(request.width, request.height) for request in requests}
    transformer = load_base(config, device, sizes, cache_of_bases(config))
    modulation = modulation_of(transformer, config.memory, config.precision, device)
    config.memory.attach(units_of(transformer), device_of(transformer))
    kernel = partial(attention_by, config.speed.attention)
    sampler = Sampler(
        transformer.eval(), model, config.precision, modulation, attention=kernel, objective=config.objective
    )
    vae = model.load_vae(device, config.precision.encoder_dtype(), config.memory.vae_tile)
    with progress("class", len(requests), "pictures") as advance:
        for start in range(0, len(requests), TOGETHER):
            some = requests[start : start + TOGETHER]
            for picture, request in zip(draw(sampler, vae, model, some, text.load), some, strict=True):
                place = file_of(folder, request)
                write_text(place.with_suffix(".txt"), request.prompt)
                with atomic_file(place, shared=True) as part:
                    save_png(picture, part, request, weights="base", sampler=config.objective.sampler)
                advance()
    del transformer, modulation, sampler, vae
    free_memory(device)


def for_drawing(config: TrainConfig, on_host: bool) -> TrainConfig:
    """Resolve the ``auto`` values of ``memory`` where there is no backward pass."""
    with silent():
        config = settle_modulation(config, on_host)
    if config.memory.checkpointing != "auto":
        return config
    return config.model_copy(update={"memory": config.memory.model_copy(update={"checkpointing": "none"})})


def with_source(config: TrainConfig, prior: ClassPictures, folder: Path) -> Several:
    """The data with the class pictures as a further source, which is for regularization."""
    side = max(source.resolution for source in subjects(config.data))
    of_class = Folder(
        path=str(folder),
        resolution=side,
        aspect="square",
        weight=prior.weight,
        regularization=True,
    )
    before = list(config.data.sources) if isinstance(config.data, Several) else [config.data]
    return Several(sources=[*before, of_class])
