"""A run's pictures for its page: validation pictures as a matrix, comparisons, and small copies."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from simpletune.apps.web.run_state import file_stamp
from simpletune.runs.folder import BASE, SAMPLES, START, STRENGTHS, pictures_at
from simpletune.runs.outputs import folder_name
from simpletune.runs.report.image_rows import painted_inputs, row_titles
from simpletune.runs.report.run_data import read_object
from simpletune.stages.png import comparison_key, generation_parameters
from simpletune.system.options import Json
from simpletune.system.sheets import spread_steps

COLUMNS = 24  # steps shown besides the base
SIDE = 512  # pixels of a small copy
TINY = 128  # pixels: app.js lets pictures up to this width stay sharp
STEP = re.compile(r"^step-(\d{6,})$")
PROMPT = re.compile(r"^prompt-(\d+)\.png$")
COMPARE = "compare"
COMPARISONS = 3  # shown on the page, newest first


@dataclass(frozen=True)
class Matrix:
    """Validation pictures, prompt by step."""

    titles: list[str]  # of the columns
    rows: list[Json]  # title, prompt and cells: the column, a file in the run's folder (empty: none), what it shows
    left_out: int  # steps in between that are not shown
    has_base: bool  # whether the first column is the base's


def matrix_of(folder: Path) -> Matrix:
    """Arrange a run's validation pictures: the base, and at most ``COLUMNS`` evenly spaced steps up to the last."""
    place = folder / SAMPLES
    try:
        names = [entry.name for entry in place.iterdir()]
    except OSError:
        names = []
    steps = sorted((name for name in names if STEP.match(name)), key=lambda name: int(name[5:]))
    shown = spread_steps(steps, COLUMNS)
    states = [state for state in (BASE, START) if state in names] + shown
    titles = [state if state in (BASE, START) else f"step {int(state[5:]):,}" for state in states]
    found = [
        (state, file, _parameters_of(file, file_stamp(file)))
        for state in reversed(states)  # the newest tells a row's place
        for file in sorted((place / state).glob("prompt-*.png"))
        if PROMPT.match(file.name)
    ]
    by_name: dict[str, str] = {}
    for _, file, how in found:
        if "prompt" in how:
            by_name.setdefault(file.name, comparison_key(how))
    files: dict[str, dict[str, Path]] = {}  # by what they were asked to be, and by state
    for state, file, how in found:  # damaged ones are shown where others of their name are
        asked = comparison_key(how) if "prompt" in how else by_name.get(file.name, json.dumps({"prompt": file.name}))
        files.setdefault(asked, {}).setdefault(state, file)
    row_names, rows = row_titles(files), []
    for asked, own in sorted(files.items(), key=lambda pair: next(iter(pair[1].values())).name):
        name, cells = row_names[asked], []
        for at, (state, title) in enumerate(zip(states, titles, strict=True)):
            shown_file = own[state].relative_to(folder).as_posix() if state in own else ""
            cells.append({"at": at, "file": shown_file, "about": f"{name}: {title}"})
        painted = painted_inputs(folder, own[states[-1]].name) if states[-1] in own else {}
        inputs = [
            {"file": file.relative_to(folder).as_posix(), "about": f"{kind.capitalize()}: {name}", "kind": kind}
            for kind, file in painted.items()
        ]
        rows.append({"title": name, "prompt": json.loads(asked)["prompt"], "cells": cells, "inputs": inputs})
    return Matrix(titles, rows, len(steps) - len(shown), BASE in names)


def strip_of(folder: Path) -> list[Json]:
    """List the pictures of a slider's last validation by prompt, each at all strengths; empty for another run."""
    place = folder / SAMPLES
    steps = [int(found[1]) for state in place.glob("step-*") if (found := STEP.match(state.name))]
    rows = []
    for file in sorted(pictures_at(place, max(steps), STRENGTHS[0]).glob("prompt-*.png")) if steps else ():
        shown = {at: pictures_at(place, max(steps), at) / file.name for at in STRENGTHS}
        frames = [
            {"title": str(at), "file": each.relative_to(folder).as_posix()}
            for at, each in shown.items()
            if each.is_file()
        ]
        rows.append({"prompt": _parameters_of(file, file_stamp(file)).get("prompt", file.name), "frames": frames})
    return rows


@functools.lru_cache(maxsize=512)
def _parameters_of(file: Path, stamp: Hashable) -> Json:
    """Read how a picture was generated; empty if it is missing or damaged."""
    try:
        return generation_parameters(file)
    except (OSError, SyntaxError, ValueError):
        return {}


@functools.lru_cache(maxsize=512)
def small_copy(file: Path, stamp: Hashable) -> bytes:
    """Make a copy of a picture of at most ``SIDE`` pixels a side, as WebP; cached until its stamp changes. Raises
    OSError, SyntaxError or ValueError if it is damaged."""
    try:
        with Image.open(file) as image:
            image.thumbnail((SIDE, SIDE))
            data = io.BytesIO()
            exact = max(image.size) <= TINY  # a page enlarges it, and would show blocks
            image.convert("RGB").save(data, format="WEBP", quality=85, lossless=exact)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None
    return data.getvalue()


def comparisons_of(folder: Path) -> list[Json]:
    """List the newest comparisons that ``simpletune compare`` has made for a run, each with the prompt, the seed and
    the picture of each model that come first; skips damaged ones."""
    place = folder / COMPARE
    names = sorted((entry.name for entry in place.iterdir() if entry.is_dir()), reverse=True) if place.is_dir() else []
    found: list[Json] = []
    for name in names:
        figures = {} if name.startswith(".") else read_object(place / name / "compare.json", [], expected=False)
        try:
            labels = [(str(model["title"]), folder_name(model["weights"])) for model in figures["models"]]
            first = figures["pictures"][0]
            prompt, seed = str(first["prompt"]), first["seed"]
        except (KeyError, TypeError, IndexError):
            continue
        frames = [{"title": title, "file": f"{COMPARE}/{name}/{label}/000.png"} for title, label in labels]
        frames = [frame for frame in frames if (folder / frame["file"]).is_file()]
        page = f"{COMPARE}/{name}/compare.html"
        if frames:
            page = page if (folder / page).is_file() else ""
            found.append({"prompt": prompt, "seed": seed, "frames": frames, "page": page})
    return found[:COMPARISONS]
