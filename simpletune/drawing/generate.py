"""Drawing with the base model, a LoRA, or a run's result: ``simpletune generate`` and the inference scripts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from simpletune.drawing.session import InferenceSession, given_arguments, open_session
from simpletune.options import UserError, plural
from simpletune.pipeline.sample import Request, save_png
from simpletune.runs.weights import (
    BASE,
    Weights,
    combine,
    full_model_of,
    lora_weights,
    precision_of,
    result_of,
)
from simpletune.system.console import say


def request_of(session: InferenceSession, args: argparse.Namespace, prompt: str | None) -> Request:
    """The picture that the run's first validation picture is, changed by the arguments."""
    option = session.config.validation
    width, height = args.size or session.config.picture_size()
    prompt = prompt or default_prompt(session)
    request = Request(prompt, option.seed, option.negative_prompt, width, height, option.steps, option.guidance)
    request = replace(
        request, **given_arguments(args, "seed", "negative_prompt", "steps", "guidance", "image", "strength")
    )
    if request.image is None and given_arguments(args, "strength"):
        raise UserError(f"--strength: {args.strength:g} is for a starting picture. Give one: --image FILE")
    return request


def requests_of(
    session: InferenceSession, args: argparse.Namespace, default: Sequence[str | None] = (None,)
) -> list[Request]:
    """Every prompt with every seed.

    Args:
        default: prompts where none is given; None: the run's first.
    """
    prompts = args.prompt or default
    first = [request_of(session, args, prompt) for prompt in prompts]
    return [replace(request, seed=request.seed + number) for request in first for number in range(args.seeds)]


def default_prompt(session: InferenceSession) -> str:
    """The run's first validation prompt; where it drew with the first caption, that one."""
    if session.config.validation.prompts:
        return session.config.validation.prompts[0]
    if session.run is None:
        raise UserError('--prompt: say what to draw, as in --prompt "a lighthouse at dusk"')
    for file in sorted((session.run / "samples" / "base").glob("*.png")):
        try:
            return Image.open(file).text["prompt"]  # type: ignore[attr-defined]
        except (OSError, ValueError, SyntaxError, AttributeError, KeyError):
            raise UserError(
                f"--prompt: {file} is damaged, so the run's prompt is not known. Say what to draw"
            ) from None
    return session.config.data.scan(Path(session.config.data.path)).pictures[0].caption


def weights_of(session: InferenceSession, args: argparse.Namespace) -> tuple[str, Weights]:
    """The weights that arguments ask for, and the picture's name.

    Raises:
        UserError: there is no run to take them from.
    """
    if args.base:
        return "base", BASE
    if args.lora:
        loras = [lora_weights(text, args.scale, "--lora: ") for text in args.lora]
        return "lora", _fused(session, args, combine(loras))
    if session.run is None:
        raise UserError("no run is named, and no LoRA. Give --run RUN, --lora FILE, or --base")
    if args.full:
        return "full", full_model_of(session.run, session.step)
    weights = result_of(session.run, args.scale, session.step)
    return ("lora" if weights.lora else "full"), _fused(session, args, weights)


def _fused(session: InferenceSession, args: argparse.Namespace, weights: Weights) -> Weights:
    """With ``--fuse``: the LoRA added to the base's weights, W + scale B A, so that it costs no time.

    Raises:
        UserError: the base is quantised.
    """
    if not given_arguments(args, "fuse") or not args.fuse or weights.lora is None:
        return weights
    precision = session.config.precision
    if not precision.trainable:
        raise UserError(
            f"--fuse: into {precision.weights} weights a LoRA cannot be added: rounding them again would lose most of "
            "it. Use --precision bf16, or leave --fuse out"
        )
    return replace(weights, label=f"{weights.label}, fused", short=f"{weights.title}, fused", merged=True)


def generate(args: argparse.Namespace) -> Path:
    """Draw pictures and say how long it took and how much memory.

    Args:
        args: as ``cli.drawing_arguments.add_arguments`` describes.

    Returns:
        The PNG; of several the first.
    """
    session = open_session(args)
    name, weights = weights_of(session, args)
    requests = requests_of(session, args)
    (drawn,) = session.draw_all([weights], requests)
    folder = session.run / "inference" if session.run else Path("inference-out")
    first = args.output or folder / f"{name}.png"
    files = [first.with_stem(f"{first.stem}-{number:03d}") for number in range(len(requests))]
    files = files if len(files) > 1 else [first]
    precision = precision_of(session.config, weights).weights
    more = {"weights": weights.label, "precision": precision, **session.speed.lossy()}
    for file, picture, request in zip(files, drawn.pictures, requests, strict=True):
        save_png(picture, file, request, **more)
        say(f"{file}: {weights.label}, {precision} weights on {session.reason}")
        say(
            f"  prompt {request.prompt!r}, seed {request.seed}, {plural(request.steps, 'step')}, "
            f"guidance {request.guidance:g}"
        )
    for text in session.speed.lossy().values():
        say(f"  lossy: {text}")
    say(f"  {drawn.denoise + drawn.decode:.2f} s per picture, peak memory {session.memory()}")
    compiling = " (with the compiling)" if session.speed.compiled else ""
    say(f"  denoise {drawn.denoise:.2f} s{compiling}, decode {drawn.decode:.2f} s")
    return files[0]
