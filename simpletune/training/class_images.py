"""Generate pictures of a class with the base before training, cache them, and add them to the data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from simpletune.config.modulation import settle_modulation
from simpletune.config.prior import ClassImages
from simpletune.config.schema import ResolvedConfig, TrainConfig, cache_of_bases
from simpletune.data.prompts import prompt_of
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.multi_source import MultiSource, scan_sources, subjects
from simpletune.data.storage.claims import ALONE, KeyedFolder, KeyRange
from simpletune.engine.denoiser import model_device, model_units
from simpletune.models.shared.buckets import Size
from simpletune.models.text.prompts import Prompts
from simpletune.runs.stack import read_stack, without_assistants
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.load import load_autoencoder, load_base, modulation_of
from simpletune.stages.png import save_png
from simpletune.stages.sample import ImageRequest, Sampler, generate_images
from simpletune.stages.step.attention import use_attention
from simpletune.stages.text_cache import TextCache
from simpletune.system.atomic import atomic_file, remove_stale, write_text
from simpletune.system.console import progress, say, silence
from simpletune.system.locks import Ranges, lock_of
from simpletune.system.options import plural
from simpletune.system.stage_timer import StageTimer

STAGE = "class"
VERSION = 1  # increment when the same settings generate other pictures
TOGETHER = 4  # pictures claimed together; their latents wait for the autoencoder


class ClassFolder(KeyedFolder):
    """Class pictures by seed. Runs that generate a different number of them, in sibling folders, use the same locks."""

    def __init__(self, folder: Path):
        super().__init__(folder, lock_of(folder.parent))

    def file(self, key: str) -> Path:
        """Return the file of the picture with a seed."""
        return self.folder / f"seed-{int(key):010d}.png"

    def remove_unfinished(self, ranges: Ranges) -> None:
        """Delete what killed processes were generating."""
        remove_stale(self.folder)


def with_class_images(config: ResolvedConfig, accelerator: Accelerator, stages: StageTimer) -> ResolvedConfig:
    """Generate the missing class pictures, and add all of them to the data as a source for regularization. Each process
    generates its share, then waits for the others. Without ``prior.method: class_pictures``, does nothing.

    The configuration's folders are resolved. Generating is the stage ``class``.
    """
    prior = config.prior
    if not isinstance(prior, ClassImages):
        return config
    requests = class_requests(config, prior)
    folder = ClassFolder(class_folder(config, requests))
    with accelerator.main_process_first():
        folder.folder.mkdir(parents=True, exist_ok=True)
        link_known(folder, requests)
        missing = [request for request in requests if str(request.seed) not in folder]
    kept = len(requests) - len(missing)
    images = plural(prior.count, "class picture")
    say(f"class   {images} of {prior.prompt!r}: {kept} kept in {folder.folder}, {len(missing)} to draw")
    if missing:
        with stages.stage(STAGE):
            generate_missing(config, missing, folder, accelerator)
    of_class = Folder(
        path=str(folder.folder),
        resolution=requests[0].width,
        aspect="square",
        weight=prior.weight,
        regularization=True,
        inpainting_loss=subjects(config.pictures)[0].inpainting_loss,
    )
    sources = list(config.pictures.sources) if isinstance(config.pictures, MultiSource) else [config.pictures]
    return config.model_copy(update={"data": MultiSource(sources=[*sources, of_class])})


def class_requests(config: TrainConfig, prior: ClassImages) -> list[ImageRequest]:
    """List the pictures to generate: squares at the subject's largest resolution, each with its own seed. With a
    trigger, their prompts are those of the class for the subject's captions, in turn."""
    data = config.pictures
    side = max(source.resolution for source in subjects(data))
    negative = config.model.text.steered_from(config.validation.negative_prompt)
    prompts = [prior.prompt]
    if prior.trigger is not None:
        images = [each for each in scan_sources(data).images if not data.members[each.source].regularization]
        captions = [prompt_of(each, data.members[each.source], config.train.seed, 0) for each in images]
        prompts = list(dict.fromkeys(prior.class_prompt(caption) for caption in captions)) or prompts
    return [
        ImageRequest(
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


def class_folder(config: TrainConfig, requests: list[ImageRequest]) -> Path:
    """Return the folder of exactly these pictures, inside a folder for everything that they depend on except seeds."""
    model, precision, first, sums = config.model, config.precision, requests[0], config.output.cache_folder
    prompts = Prompts(model.text, precision.encoder_dtype())
    depends = {
        "base": [
            model.files.part(model.denoiser).fingerprint(sums),
            model.init,
            config.train.seed if model.init == "random" else 0,
            *([] if (stack := read_stack(without_assistants(config))) is None else [stack.key]),
        ],
        "encoders": [prompts.fingerprint(encoder, sums) for encoder in prompts.encoders],
        "vae": model.files.part("vae").fingerprint(sums),
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


def link_known(folder: ClassFolder, requests: Sequence[ImageRequest]) -> None:
    """Link pictures generated by runs with another number of them or with other seeds."""
    for request in requests:
        place = folder.file(str(request.seed))
        beside = sorted(folder.folder.parent.iterdir())
        known = [sibling / place.name for sibling in beside if sibling != folder.folder]
        generated = next((file for file in known if file.is_file()), None)
        if generated is not None and not place.is_file():
            for source in (generated.with_suffix(".txt"), generated):
                with atomic_file(place.with_suffix(source.suffix), shared=True) as part:
                    os.link(source, part)


def generate_missing(
    config: TrainConfig, requests: list[ImageRequest], folder: ClassFolder, accelerator: Accelerator
) -> None:
    """Generate pictures with the base, using training's memory levers, then free the base. Each process generates the
    pictures that it claims, and loads the base only after claiming some."""
    device, model = accelerator.device, config.model
    share = KeyRange(accelerator.process_index, accelerator.num_processes)
    text = TextCache(model, config.precision.encoder_dtype(), config.output.place)
    # With an object store, nobody waits for the others' shares: each process encodes all the prompts that it needs.
    dividing = share if config.output.place.url is None else ALONE
    text.fill([text for request in requests for text in request.texts], device, dividing)
    by_key = {str(request.seed): request for request in requests}
    sampler: Sampler | None = None
    with progress("class", share.count(len(requests)), "pictures") as advance:
        for keys in folder.claim(by_key, share, TOGETHER):
            link_known(folder, [by_key[key] for key in keys])  # another run has generated them meanwhile
            some = [by_key[key] for key in keys if key not in folder]
            if not some:
                continue
            if sampler is None:
                sampler = sampler_of(config, device, {(request.width, request.height) for request in requests})
                vae = load_autoencoder(config, device)
            for image, request in zip(generate_images(sampler, vae, model, some, text.load), some, strict=True):
                place = folder.file(str(request.seed))
                write_text(place.with_suffix(".txt"), request.prompt, shared=True)
                with atomic_file(place, shared=True) as part:
                    save_png(image, part, request, weights="base", sampler=config.objective.sampler)
                advance()
    if sampler is not None:
        del sampler, vae
        free_memory(device)


def sampler_of(config: TrainConfig, device: torch.device, sizes: set[Size]) -> Sampler:
    """Load the base to generate pictures of these sizes, with training's memory levers."""
    with silence():
        config = settle_modulation(config, on_host=device.type == "cpu")
    if config.memory.checkpointing == "auto":  # there is no backward pass
        config = config.model_copy(update={"memory": config.memory.model_copy(update={"checkpointing": "none"})})
    denoiser = load_base(
        without_assistants(config), device, sizes, cache_of_bases(config), read_stack(without_assistants(config))
    )
    modulation = modulation_of(denoiser, config, device)
    config.memory.attach(model_units(denoiser), model_device(denoiser))
    kernel = partial(use_attention, config.speed.attention)
    return Sampler(
        denoiser.eval(), config.model, config.precision, modulation, attention=kernel, objective=config.objective
    )
