"""Pictures of several models side by side, from the same noise and in the same precision: ``simpletune compare``."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from simpletune.checkpoint import write_json
from simpletune.generate import Studio, open_studio, request_of
from simpletune.options import UserError
from simpletune.results import BASE, Weights, lora_weights, result_of
from simpletune.sampling import Request, grid, save_png
from simpletune.terminal import say

SCALES = (0.5, 1.0)


def models_to_compare(studio: Studio, args: argparse.Namespace) -> list[Weights]:
    """The base first, then each LoRA at each strength, or the run's result.

    Raises:
        UserError: neither a run nor a LoRA is given.
    """
    scales = args.scale or SCALES
    if args.lora:
        return [BASE, *(lora_weights(name, scale) for name in args.lora for scale in scales)]
    if studio.run is None:
        raise UserError("--lora: no LoRA is given, and no run. Give one of them")
    if result_of(studio.run).transformer is not None:
        return [BASE, result_of(studio.run)]
    return [BASE, *(result_of(studio.run, scale) for scale in scales)]


def requests_of(studio: Studio, args: argparse.Namespace) -> list[Request]:
    """Every prompt with every seed."""
    prompts = args.prompt or studio.config.validation.prompts or [None]
    first = [request_of(studio, args, prompt) for prompt in prompts]
    return [replace(request, seed=request.seed + number) for request in first for number in range(args.seeds)]


def difference(a: Image.Image, b: Image.Image) -> float:
    """Mean absolute difference of two pictures' values, 0 to 1."""
    return float(np.abs(np.asarray(a, dtype=np.float32) - np.asarray(b, dtype=np.float32)).mean() / 255)


def compare(args: argparse.Namespace) -> Path:
    """Draw every request with every model; write single pictures, one grid and the figures.

    Args:
        args: as ``generate_arguments.add_compare_arguments`` describes.

    Returns:
        The grid.
    """
    studio = open_studio(args)
    models, requests = models_to_compare(studio, args), requests_of(studio, args)
    folder = args.output or (studio.run / "compare" if studio.run else Path("inference-out") / "compare")
    columns: list[list[Image.Image]] = []
    figures: list[dict[str, Any]] = []
    for weights in models:
        pictures, seconds = studio.draw(weights, requests)
        columns.append(pictures)
        for number, (picture, request) in enumerate(zip(pictures, requests, strict=True)):
            save_png(picture, folder / file_name(weights.label) / f"{number:03d}.png", request, weights=weights.label)
        away = [difference(picture, base) for picture, base in zip(pictures, columns[0], strict=True)]
        figures.append({"weights": weights.label, "seconds_per_picture": seconds, "difference_from_base": away})
        say(f"{weights.label}: {seconds:.2f} s per picture, mean difference from the base {np.mean(away):.4f}")
    sheet = folder / "grid.png"
    rows = [
        (f"{request.prompt}  (seed {request.seed})", [column[number] for column in columns])
        for number, request in enumerate(requests)
    ]
    grid(rows, [title(weights) for weights in models]).save(sheet)
    precision = studio.config.precision.weights
    write_json(folder / "compare.json", {"precision": precision, "device": studio.reason, "models": figures})
    say(f"{sheet}: {len(models)} models, {len(requests)} pictures each, {precision} weights on {studio.reason}")
    say(f"  peak memory {studio.memory()}")
    return sheet


def title(weights: Weights) -> str:
    """A column's title."""
    if weights.lora is not None:
        return f"LoRA x {weights.scale:g}"
    return "base" if weights.transformer is None else "full"


def file_name(label: str) -> str:
    """A label as a folder's name."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-")
