"""``simpletune generate`` and the inference scripts: generate with the base model, a LoRA, or a run's result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from simpletune.adapters.text.embedding_files import read_embeddings
from simpletune.commands.generate.session import GenerationSession, given_arguments, open_session
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.multi_source import example_prompt
from simpletune.runs.folder import CHECKPOINTS
from simpletune.runs.outputs import require_new, write_numbered
from simpletune.runs.stack import given_lora
from simpletune.runs.text_side import embedding_of, with_embeddings
from simpletune.runs.weights import (
    BASE,
    Embedding,
    Weights,
    combine,
    full_model_of,
    lora_weights,
    precision_of,
    run_result,
)
from simpletune.runs.weights_names import DENOISERS, LORA_FILE
from simpletune.stages.png import generation_parameters, save_png
from simpletune.stages.sample import ImageRequest, mask_pixels
from simpletune.system.atomic import atomic_file
from simpletune.system.console import say
from simpletune.system.options import UserError, plural


def build_requests(
    session: GenerationSession, args: argparse.Namespace, default: Sequence[str | None] = (None,)
) -> list[ImageRequest]:
    """Combine every prompt with every seed, with the settings of the run's validation pictures, changed by the
    arguments. Of the default prompts, None stands for the run's first."""
    option = session.config.validation
    width, height = image_size(session.config, args)
    changed = given_arguments(
        args, "seed", "negative_prompt", "steps", "guidance", "image", "strength", "mask", "paste"
    )
    if "mask" in changed:
        changed.setdefault("strength", 1.0)  # as diffusers' inpainting pipelines for UNets
    requests, negative = [], session.config.model.text.steered_from(option.negative_prompt)
    for prompt in args.prompt or default:
        prompt = default_prompt(session) if prompt is None else prompt
        first = ImageRequest(prompt, option.seed, negative, width, height, option.steps, option.guidance)
        first = replace(first, **changed)
        place = session.config.model.autoencoder.downsampling
        require_inputs(first, "strength" in given_arguments(args, "strength"), place)
        requests += [replace(first, seed=first.seed + number) for number in range(args.seeds)]
    return requests


def image_size(config: TrainConfig, args: argparse.Namespace) -> tuple[int, int]:
    """Return the size to generate, by the arguments or the run. Raises UserError if the model cannot."""
    width, height = args.size or config.image_size()
    network, title = config.model.architecture, config.model.words.title
    step = network.generated_multiple
    if width % step or height % step:
        near = "x".join(str(max(step, side // step * step)) for side in (width, height))
        raise UserError(
            f"--size: {width}x{height}, but {title} needs sides that are multiples of {step}. Use {near}, for example"
        )
    if max(width, height) > (most := network.largest_side):
        raise UserError(f"--size: {width}x{height}, but the model has positions for at most {most} px a side. Use less")
    return width, height


def require_inputs(request: ImageRequest, strength: bool, place: int) -> None:
    """Check that a request's arguments have the picture and the mask that they need, and that these can be used. Raises
    UserError if they do not, or cannot."""
    if request.image is None and request.mask is None and strength:
        raise UserError(f"--strength: {request.strength:g} needs an initial picture. Give one: --image FILE")
    if request.mask is None and request.paste:
        raise UserError("--paste: without a mask there is nothing outside it. Give one: --mask FILE")
    if request.mask is not None:
        mask_pixels(request, place)


def default_prompt(session: GenerationSession) -> str:
    """Return the run's first validation prompt, or the caption that it used instead."""
    if session.config.validation.prompts:
        return session.config.validation.prompts[0]
    if session.run is None:
        raise UserError('--prompt is missing. Describe what to draw, as in --prompt "a lighthouse at dusk"')
    for file in sorted((session.run / "samples" / "base").glob("*.png")):
        try:
            return str(generation_parameters(file)["prompt"])
        except (OSError, ValueError, SyntaxError, KeyError):
            raise UserError(f"--prompt: {file} is damaged, so the run's prompt is not known. Give a prompt") from None
    if session.config.concept is not None:
        return session.config.concept.directions[0].target
    return example_prompt(session.config.pictures, session.config.train.seed)


def choose_weights(session: GenerationSession, args: argparse.Namespace) -> tuple[str, Weights]:
    """Return the kind of weights that the arguments choose, used in file names, and the weights."""
    given = given_embeddings(args)
    if args.base:
        return "base", with_embeddings(BASE, given)
    if args.lora:
        loras = [lora_weights(text, 1.0 if args.scale is None else args.scale, "--lora: ") for text in args.lora]
        return "lora", _fuse_if_asked(session, args, with_embeddings(combine(loras), given))
    if session.run is None and given:
        return "embeddings", with_embeddings(Weights("base with embeddings"), given)
    if session.run is None:
        raise UserError("neither a run nor a LoRA is named. Use --run RUN, --lora FILE, --embedding FILE, or --base")
    scale = session.strength if args.scale is None else args.scale
    if args.full:
        return "full", with_embeddings(full_model_of(session.run, scale, session.step), given)
    weights = with_embeddings(run_result(session.run, scale, session.step), given)
    alone = weights.denoiser is None and weights.trained is None
    return ("lora" if weights.lora else "embeddings" if alone else "full"), _fuse_if_asked(session, args, weights)


def given_embeddings(args: argparse.Namespace) -> list[Embedding]:
    return [embedding_of(text) for text in vars(args).get("embedding") or ()]


def _fuse_if_asked(session: GenerationSession, args: argparse.Namespace, weights: Weights) -> Weights:
    """Apply ``--fuse``: add the LoRA to the base's weights, W + scale B A, so that it costs no time."""
    if not given_arguments(args, "fuse") or not args.fuse or weights.lora is None:
        return weights
    precision = session.config.precision
    if not precision.trainable:
        raise UserError(
            f"--fuse: a LoRA cannot be added to {precision.weights} weights: rounding again would lose most of it. "
            "Use --precision bf16, or leave out --fuse"
        )
    return replace(weights, label=f"{weights.label}, fused", short=f"{weights.title}, fused", merged=True)


def generate(args: argparse.Namespace) -> Path:
    """Generate pictures; print times and peak memory. Returns the first PNG."""
    session = open_session(args)
    name, weights = choose_weights(session, args)
    requests = build_requests(session, args)
    outputs: list[Path] = []
    if args.output:
        first, count = args.output, len(requests)
        if first.suffix.lower() != ".png":
            raise UserError(f"--out: {first} does not end in .png. Use {first.with_suffix('.png')}")
        several = [first.with_stem(f"{first.stem}-{number:03d}") for number in range(count)]
        outputs = [first] if count == 1 else several
        for file in outputs:
            require_new(file, args.overwrite)
    (generated,) = session.generate_all([weights], requests)
    precision = precision_of(session.config, weights).weights
    more = image_metadata(session, weights)
    files: list[Path] = []
    for number, (image, request) in enumerate(zip(generated.images, requests, strict=True)):

        def save(file: Path, image: Image.Image = image, request: ImageRequest = request) -> None:
            save_png(image, file, request, **more)

        if outputs:
            files.append(outputs[number])
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(files[-1], shared=True) as part:
                save(part)
        else:
            folder = session.run / "inference" if session.run else Path("inference-out")
            files.append(write_numbered(folder, f"{name}-seed{request.seed}.png", save))
        say(f"{files[-1]}: {weights.label}, {precision} weights on {session.reason}")
        say(
            f"  prompt {request.prompt!r}, seed {request.seed}, {plural(request.steps, 'step')}, "
            f"guidance {request.guidance:g}"
        )
    say_what_is_painted(session, requests[0])
    for text in session.speed.lossy().values():
        say(f"  lossy: {text}")
    say(f"  {generated.denoise + generated.decode:.2f} s per picture, peak memory {session.memory()}")
    compiling = " (including compilation)" if session.speed.compiled else ""
    say(f"  denoise {generated.denoise:.2f} s{compiling}, decode {generated.decode:.2f} s")
    return files[0]


def say_what_is_painted(session: GenerationSession, request: ImageRequest) -> None:
    """Say what an inpainting model paints if no mask tells it."""
    if session.config.model.inpaints and request.mask is None:
        say("  an inpainting model without a mask: it paints the whole picture")


def image_metadata(session: GenerationSession, weights: Weights) -> dict[str, object]:
    """Return a picture's metadata besides its request: model, LoRAs with strengths, precision, lossy settings."""
    own = weights.denoiser or weights.trained
    model = _name_of(own) if own else session.config.model.files.weights_from
    loras = [(_name_of(file), scale) for file, scale in weights.loras]
    under = {} if weights.alone or own else base_loras(session.config)
    precision = precision_of(session.config, weights).weights
    files = [(file, each.token) for file, token in weights.embeddings for each in read_embeddings(file, token)]
    called = {"embeddings": [(file.stem, token) for file, token in files]} if files else {}
    return {
        "model": model,
        **under,
        "loras": loras,
        **called,
        "weights": weights.label,
        "precision": precision,
        "sampler": session.config.objective.sampler,
        **session.speed.lossy(),
    }


def base_loras(config: TrainConfig) -> dict[str, object]:
    """Return a picture's metadata of the LoRAs in the base, if there are any."""
    given = [given_lora("model.loras", text) for text in config.model.loras]
    return {"base_loras": [(_name_of(each.file), each.scale) for each in given]} if given else {}


def _name_of(weights: Path) -> str:
    """Shorten the name of a weight file or folder; a run's are named by run and checkpoint."""
    place = weights.resolve()
    if place.parent.parent.name == CHECKPOINTS:
        return f"{place.parents[2].name}-{place.parent.name}"
    return place.parent.name if place.name in (LORA_FILE, *DENOISERS) else place.stem
