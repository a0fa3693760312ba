"""A run's pictures for its page: validation pictures as a matrix, others by name; and small copies of them."""

from __future__ import annotations

import functools
import io
import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from simpletune.runs.folder import SAMPLES
from simpletune.stages.png import generation_parameters
from simpletune.system.options import Json

COLUMNS = 7  # steps in the matrix besides the base
SIDE = 256  # pixels of a small copy
BASE = "base"
STEP = re.compile(r"^step-(\d{6,})$")
PROMPT = re.compile(r"^prompt-(\d+)\.png$")


@dataclass(frozen=True)
class Cell:
    """A picture of the matrix.

    Args:
        file: its path relative to the run's folder; empty if it is missing.
        about: what it shows.
    """

    file: str
    about: str


@dataclass(frozen=True)
class PromptRow:
    """The pictures of one prompt: the base's first, then by step."""

    prompt: str
    cells: list[Cell]


@dataclass(frozen=True)
class Matrix:
    """Validation pictures, prompt by step.

    Args:
        titles: the columns' titles.
        rows: one for each prompt.
        left_out: the number of steps in between that are not shown.
    """

    titles: list[str]
    rows: list[PromptRow]
    left_out: int


def matrix_of(folder: Path) -> Matrix:
    """Arrange a run's validation pictures: the base, and at most ``COLUMNS`` evenly spaced steps up to the last."""
    place = folder / SAMPLES
    try:
        names = [entry.name for entry in place.iterdir()]
    except OSError:
        names = []
    steps = sorted((name for name in names if STEP.match(name)), key=lambda name: int(name[5:]))
    shown = [steps[number] for number in thinned_places(len(steps), COLUMNS)]
    states = [BASE] * (BASE in names) + shown
    titles = ["base" if state == BASE else f"step {int(state[5:]):,}" for state in states]
    pictures = sorted({file.name for state in states for file in (place / state).glob("prompt-*.png")})
    rows = [row for name in pictures if PROMPT.match(name) and (row := _row(place, name, states, titles)).cells]
    return Matrix(titles, rows, len(steps) - len(shown))


def thinned_places(count: int, most: int) -> list[int]:
    """Indices of ``most`` of ``count`` items, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(number * (count - 1) / (most - 1)) for number in range(most)})


def _row(place: Path, name: str, states: list[str], titles: list[str]) -> PromptRow:
    files = [place / state / name for state in states]
    prompt = next((str(how["prompt"]) for file in files if "prompt" in (how := drawing_of(file))), name)
    cells = [
        Cell(f"{SAMPLES}/{state}/{name}" if file.is_file() else "", f"{prompt}: {title}")
        for file, state, title in zip(files, states, titles, strict=True)
    ]
    return PromptRow(prompt, cells)


def drawing_of(file: Path) -> Json:
    """How a picture was drawn; empty if it is missing or damaged."""
    try:
        status = file.stat()
    except OSError:
        return {}
    return _drawing(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=512)
def _drawing(file: Path, changed: int, size: int) -> Json:
    try:
        return generation_parameters(file)
    except (OSError, SyntaxError, ValueError):
        return {}


def small_copy(file: Path) -> bytes:
    """A copy of a picture of at most ``SIDE`` pixels a side, as WebP.

    Raises:
        OSError, SyntaxError, ValueError: the file is not a picture.
    """
    status = file.stat()
    return _small(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=512)
def _small(file: Path, changed: int, size: int) -> bytes:
    with Image.open(file) as image:
        image.thumbnail((SIDE, SIDE))
        data = io.BytesIO()
        image.convert("RGB").save(data, format="WEBP", quality=85)
    return data.getvalue()
