"""``simpletune compare``: generate with several models from the same noise, in the same precision, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from simpletune.commands.evaluate.encoders import ImageEncoder, find_encoder
from simpletune.commands.generate.compare_page import LATEST, REDIRECT, ModelFigures, write_page
from simpletune.commands.generate.generate import (
    GenerationSession,
    build_requests,
    given_embeddings,
    image_metadata,
    open_session,
    say_what_is_painted,
)
from simpletune.commands.generate.session import GeneratedImages
from simpletune.estimate.generate_memory import decoding_bytes, generation_bytes
from simpletune.estimate.job_estimate import MIB, shortage
from simpletune.estimate.run_estimate import WITHOUT_GPU, card_at_hand
from simpletune.estimate.simulate.simulate_stages import simulate_stage
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.outputs import folder_name, numbered_folder, require_new
from simpletune.runs.text_side import with_embeddings
from simpletune.runs.weights import (
    ALONE,
    BASE,
    Weights,
    checkpoints_of,
    find_weights,
    lora_weights,
    precision_of,
    run_result,
)
from simpletune.runs.weights_names import find_named, is_run, is_unfinished, split_scale
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.png import request_values, save_png
from simpletune.stages.sample import ImageRequest, shown_inputs
from simpletune.system.atomic import write_json, write_text
from simpletune.system.console import say
from simpletune.system.options import UserError, plural
from simpletune.system.safetensors_file import WeightReader
from simpletune.system.sheets import grid

SCALES = (0.5, 1.0)
PAGE, SHEET, FIGURES = "compare.html", "grid.png", "compare.json"
KINDS_BY_OPTION = {"--clip": ("clip",), "--dino": ("dino", "dinov2")}
"""The kinds of encoders that each option takes."""


def models_to_compare(session: GenerationSession, args: argparse.Namespace) -> list[Weights]:
    """Return the base, then the models that the arguments name, or the run's result; each once. Before them, the base
    without the LoRAs that the run trained on top of, if it did."""
    scales = args.scale or SCALES
    wanted = [name for name in args.models if not (args.checkpoints and is_unfinished(Path(name)))]
    models = [BASE, *(weights for name in wanted for weights in resolve_weights(name))]
    models += [lora_weights(text, scale, "--lora: ") for text in args.lora or () for scale in scales]
    if args.checkpoints:
        runs = [Path(name) for name in args.models if list_checkpoints(Path(name))]
        if not runs:
            if session.run is None:
                raise UserError("--checkpoints: no run is named. Name one: --run FOLDER")
            runs = [session.run]
        models += [w for run in runs for scale in args.scale or [1.0] for w in checkpoints_of(run, scale)]
    if len(models) == 1 and not args.models and session.run is None and vars(args).get("embedding"):
        models.append(Weights("embeddings"))
    if len(models) == 1 and not args.models:
        if session.run is None:
            raise UserError("neither a run nor a LoRA is named. Use --run RUN, --lora FILE, or name a model to compare")
        own = args.scale or (SCALES if session.strength == 1 else [session.strength])
        models += dict.fromkeys(run_result(session.run, scale, session.step) for scale in own)
    given = given_embeddings(args)
    alone = [ALONE] if session.config.model.loras else []
    return drop_duplicates([*alone, models[0], *(with_embeddings(weights, given) for weights in models[1:])])


def first_run(args: argparse.Namespace) -> str | None:
    """Find the first run that the arguments name, directly or by one of its checkpoints or LoRAs; None if none."""
    for text in [*args.models, *(args.lora or ())]:
        place = Path(split_scale(text)[0].partition("@")[0]).absolute()
        for folder in [place, *place.parents[:3]]:
            if is_run(folder):
                return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
    return None


def resolve_weights(text: str) -> list[Weights]:
    """Resolve a name given on the command line: ``base``, or anything that ``find_named`` knows."""
    if text == "base":
        return [BASE]
    found = find_named(text)
    if found.scale is not None and found.is_text_alone:
        raise UserError(f"{text}: embeddings have no strength. Leave out :{found.scale:g}")
    if found.scale is not None and found.lora is None:
        raise UserError(f"{text}: a full model has no strength. Leave out :{found.scale:g}")
    return [find_weights(found)]


def drop_duplicates(models: Sequence[Weights]) -> list[Weights]:
    """Drop duplicates. Of two models with equal weights, keep the one with the later position and name, because
    checkpoints are ordered by step; for full models keep the result, which has the base's precision."""
    kept: list[Weights] = []
    for weights in dict.fromkeys(models):
        twin = next((each for each in kept if _are_same(each, weights)), None)
        if twin is not None:
            say(f"{twin.title} and {weights.title} have the same weights: one column, {weights.title}")
            kept.remove(twin)
            weights = replace(twin, short=weights.title) if weights.trained else weights
        kept.append(weights)
    return kept


def _are_same(a: Weights, b: Weights) -> bool:
    if a.merged != b.merged or [token for _, token in a.embeddings] != [token for _, token in b.embeddings]:
        return False
    if not _equal_files(a.embeddings, b.embeddings):
        return False
    if a.embeddings and not (a.lora or b.lora or a.trained or b.trained or a.denoiser or b.denoiser):
        return True
    if a.loras and [scale for _, scale in a.loras] == [scale for _, scale in b.loras]:
        return _equal_files(a.loras, b.loras)
    trained, whole = (a.trained, b.denoiser) if a.trained else (b.trained, a.denoiser)
    if trained is None or whole is None:
        return False
    if trained.resolve().parents[2] != whole.resolve().parent:  # RUN/checkpoints/step-N/FILE and RUN/transformer
        return False  # of different runs: they need not be read
    return _holds_all_of(sorted(whole.glob("*.safetensors")), trained)


def _equal_files(a: Sequence[tuple[Path, object]], b: Sequence[tuple[Path, object]]) -> bool:
    """Return whether the files of two lists hold the same tensors, pair by pair."""
    pairs = [(one, other) for (one, _), (other, _) in zip(a, b, strict=True)]
    return all(one == other or _holds_all_of([one], other, both=True) for one, other in pairs)


def _holds_all_of(files: list[Path], part: Path, both: bool = False) -> bool:
    """Return whether ``files`` contain every tensor of ``part`` with equal values, compared in the type of ``files``;
    both: and no others."""
    whole, some = WeightReader(files), WeightReader([part])
    if not (some.names == whole.names if both else some.names <= whole.names):
        return False
    for name in sorted(some.names):
        one, other = whole.get(name), some.get(name)
        if one.shape != other.shape or not bool((one == other.to(one.dtype)).all()):
            return False
    return True


def compare(args: argparse.Namespace) -> Path:
    """Generate every request with every model; write pictures, a grid, a page and the figures. Returns the grid."""
    args.run = args.run or first_run(args)
    session = open_session(args)
    models = models_to_compare(session, args)
    requests = build_requests(session, args, session.config.validation.prompts or (None,))
    if args.output:
        require_new(args.output, overwrite=False, folder=True)
    if session.run is not None:
        say(f"settings of {session.run}{'' if args.run else ', the newest run'}")
    if args.predict:
        require_memory(session, models, requests)
    columns = session.generate_all(models, requests)
    own = session.run / "compare" if session.run else Path("inference-out") / "compare"
    folder = args.output or numbered_folder(own)
    figures = [figures_of(session, column, columns[0]) for column in columns]
    add_scores(session, args, columns, requests, figures)
    for column, figure in zip(columns, figures, strict=True):
        made = image_metadata(session, column.weights)
        for number, (image, request) in enumerate(zip(column.images, requests, strict=True)):
            save_png(image, folder / folder_name(column.weights.label) / f"{number:03d}.png", request, **made)
        away = np.mean(figure["difference_from_base"])
        seconds = figure["seconds_per_picture"]
        say(f"{column.weights.label}: {seconds:.2f} s per picture, mean difference from the base {away:.4f}")
    sheet, precision = folder / SHEET, session.config.precision.weights
    rows = [
        (
            f"{request.prompt}  (seed {request.seed})",
            [*shown_inputs(request).values(), *(c.images[n] for c in columns)],
        )
        for n, request in enumerate(requests)
    ]
    grid(rows, [*shown_inputs(requests[0]), *(column.weights.title for column in columns)]).save(sheet)
    say_what_is_painted(session, requests[0])
    about = {
        "precision": precision,
        "device": session.reason,
        "peak_memory": session.memory(),
        **session.speed.lossy(),
        "stages": session.stages.as_json(),
        "pictures": [{"image": None, "strength": request.strength, **request_values(request)} for request in requests],
    }
    write_json(folder / FIGURES, {**about, "models": figures})
    page = folder / PAGE
    write_page(page, columns, requests, figures, about)
    if len({figure["precision"] for figure in figures}) > 1:
        listed = "; ".join(f"{figure['title']}: {figure['precision']}" for figure in figures)
        say(f"warning precisions differ, so not all differences come from training: {listed}")
        say("  full models are not quantised; --precision bf16 uses one precision for all")
    say(
        f"{sheet}: {plural(len(models), 'model')}, {plural(len(requests), 'picture')} each, {precision} weights on "
        f"{session.reason}"
    )
    say(f"  {page}: page with a slider, works offline")
    if not args.output:
        write_text(own / LATEST, REDIRECT.format(newest=page.relative_to(own).as_posix()), shared=True)
        say(f"  {own / LATEST}: always opens the newest comparison")
    say(f"  peak memory {session.memory()}")
    return sheet


def require_memory(session: GenerationSession, models: Sequence[Weights], requests: Sequence[ImageRequest]) -> None:
    """Predict and print the memory of every stage; on the CPU nothing is refused.

    Text encoders, denoiser and autoencoder are never in memory together.
    """
    config = session.config
    card, held = card_at_hand(session.device) if session.device.type == "cuda" else (None, 0)
    largest = max(requests, key=lambda request: (request.width * request.height, request.guidance > 1))
    precisions = {precision_of(config, weights).weights: precision_of(config, weights) for weights in models}
    batch = min(session.speed.batch_size, len(requests))
    stages = {
        "text": simulate_stage(config, "text", WITHOUT_GPU if card is None else card.capability).bytes,
        "draw": max(generation_bytes(config, largest, precision, batch) for precision in precisions.values()),
        "decode": decoding_bytes(config, largest),
    }
    for name, size in stages.items():
        say(f"predict {name}: {size / MIB:,.0f} MiB")
        if card is not None and (short := shortage(name, size, card, held)):
            raise UserError(f"{short}. Draw smaller pictures, or end what uses the card")


def pixel_difference(a: Image.Image, b: Image.Image) -> float:
    """Compute the mean absolute difference of two pictures' values, 0 to 1."""
    return float(np.abs(np.asarray(a, dtype=np.float32) - np.asarray(b, dtype=np.float32)).mean() / 255)


def latent_distance(a: Tensor, b: Tensor) -> float:
    """Compute the root mean square difference of two latents; latents have a variance of about 1."""
    return float((a - b).square().mean().sqrt())


def figures_of(session: GenerationSession, column: GeneratedImages, base: GeneratedImages) -> ModelFigures:
    """Compute one model's times, and the distance of its pictures from the base's."""
    return {
        "weights": column.weights.label,
        "title": column.weights.title,
        "precision": precision_of(session.config, column.weights).weights,
        "seconds_per_picture": column.denoise + column.decode,
        "seconds": {"denoise": column.denoise, "decode": column.decode},
        "difference_from_base": [pixel_difference(a, b) for a, b in zip(column.images, base.images, strict=True)],
        "latent_distance_from_base": [latent_distance(a, b) for a, b in zip(column.latents, base.latents, strict=True)],
    }


def open_encoder(option: str, name: str, device: torch.device) -> ImageEncoder:
    """Load the encoder that ``--clip`` or ``--dino`` names."""
    return find_encoder(name, option, KINDS_BY_OPTION[option]).load(device)


def add_scores(
    session: GenerationSession,
    args: argparse.Namespace,
    columns: Sequence[GeneratedImages],
    requests: Sequence[ImageRequest],
    figures: Sequence[ModelFigures],
) -> None:
    """Add cosines by the chosen encoders to the figures, with one encoder in memory at a time."""
    if args.clip:
        with session.stages.stage("clip"):
            clip = open_encoder("--clip", args.clip, session.device)
            prompts = normalize(clip.embed_prompts([request.prompt for request in requests]), dim=-1)
            seen = [normalize(clip.embed_images(column.images), dim=-1) for column in columns]
            del clip
            free_memory(session.device)
        for figure, images in zip(figures, seen, strict=True):
            figure["clip_prompt"] = (images * prompts).sum(-1).tolist()
            figure["clip_base"] = (images * seen[0]).sum(-1).tolist()
    if args.dino:
        with session.stages.stage("dino"):
            dino = open_encoder("--dino", args.dino, session.device)
            seen = [normalize(dino.embed_images(column.images), dim=-1) for column in columns]
            del dino
            free_memory(session.device)
        for figure, images in zip(figures, seen, strict=True):
            figure["dino_base"] = (images * seen[0]).sum(-1).tolist()
