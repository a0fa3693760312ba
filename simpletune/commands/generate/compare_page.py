"""Write the page of ``simpletune compare``: one self-contained file that fetches nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import numpy as np
from PIL import Image

from simpletune.commands.generate.session import GeneratedImages
from simpletune.runs.report.page import page_style, page_template
from simpletune.stages.sample import ImageRequest, shown_inputs
from simpletune.system.atomic import write_text
from simpletune.system.options import plural

LATEST = "latest.html"  # a page with a fixed name that redirects to the newest comparison of a folder
REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={newest}">
<title>simpletune compare</title>
<p><a href="{newest}">The newest comparison</a></p>
</html>
"""
LOSSLESS = 256  # pixels; larger pictures are embedded as WebP, with the PNGs beside the page
Measure = Literal["difference_from_base", "latent_distance_from_base", "clip_prompt", "clip_base", "dino_base"]


class ModelFigures(TypedDict):
    """One model's times and its pictures' distances from the base's, as in ``compare.json``."""

    weights: str
    title: str
    precision: str
    seconds_per_picture: float
    seconds: dict[str, float]
    difference_from_base: list[float]
    latent_distance_from_base: list[float]
    clip_prompt: NotRequired[list[float]]
    clip_base: NotRequired[list[float]]
    dino_base: NotRequired[list[float]]


MEASURES: dict[Measure, tuple[str, str]] = {
    "difference_from_base": ("pixels", "mean difference from the base's picture, 0 to 1"),
    "latent_distance_from_base": ("latents", "root mean square distance from the base's latents"),
    "clip_prompt": ("CLIP, prompt", "cosine similarity of picture and prompt by CLIP"),
    "clip_base": ("CLIP, base", "cosine similarity to the base's picture by CLIP"),
    "dino_base": ("DINO, base", "cosine similarity to the base's picture by DINO"),
}


def write_page(
    file: Path,
    columns: Sequence[GeneratedImages],
    requests: Sequence[ImageRequest],
    figures: Sequence[ModelFigures],
    about: Mapping[str, object],
) -> None:
    """Write the page: a slider between any two models, a table of all pictures, and the measures.

    Columns: one per model, the base first; requests: one per row; ``about``: ``device``, ``precision`` and
    ``peak_memory`` of the comparison.
    """
    shown = {key: words for key, words in MEASURES.items() if key in figures[0]}
    rows = [
        {
            "prompt": request.prompt,
            "seed": request.seed,
            "size": f"{request.width} x {request.height}",
            "how": f"{plural(request.steps, 'step')}, guidance {request.guidance:g}",
            "negative": request.negative_prompt,
            "inputs": {title: image_data_uri(image) for title, image in shown_inputs(request).items()},
            "cells": [image_data_uri(column.images[number]) for column in columns],
            "away": [figure["difference_from_base"][number] for figure in figures],
        }
        for number, request in enumerate(requests)
    ]
    models = [
        {
            "title": f["title"],
            "label": f["weights"],
            "precision": f["precision"],
            "seconds": f["seconds_per_picture"],
            "denoise": f["seconds"]["denoise"],
            "decode": f["seconds"]["decode"],
            "means": [float(np.mean(f[key])) for key in shown],
        }
        for f in figures
    ]
    small = max(request.width for request in requests) <= LOSSLESS
    text = page_template("compare").render(
        models=models,
        rows=rows,
        measures=list(shown.values()),
        about=about,
        small=small,
        style=page_style("compare"),
    )
    write_text(file, text)


def image_data_uri(image: Image.Image) -> str:
    """Encode a picture within a page: a small one losslessly, a large one as WebP."""
    data = io.BytesIO()
    lossless = max(image.size) <= LOSSLESS
    image.save(data, "PNG") if lossless else image.save(data, "WEBP", quality=92)
    kind = "png" if lossless else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"
