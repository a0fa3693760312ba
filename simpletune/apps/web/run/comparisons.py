"""The comparisons that ``simpletune compare`` has drawn for a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simpletune.runs.outputs import folder_name
from simpletune.runs.report.run_data import read_object

COMPARE = "compare"
COMPARISONS = 3  # shown on the page, newest first


@dataclass(frozen=True)
class ComparedPicture:
    """A picture of a comparison: the model's title, and the file in the run's folder."""

    title: str
    file: str


@dataclass(frozen=True)
class Comparison:
    """One comparison of ``simpletune compare``.

    Args:
        name: its folder's name.
        prompt: the prompt of its first picture.
        seed: the seed of its first picture.
        frames: the first picture of each model, the base first.
        page: its own page, relative to the run's folder; empty if it is missing.
    """

    name: str
    prompt: str
    seed: int | None
    frames: list[ComparedPicture]
    page: str


def comparisons_of(folder: Path) -> list[Comparison]:
    """A run's newest comparisons; skips damaged ones."""
    place = folder / COMPARE
    names = sorted((entry.name for entry in place.iterdir() if entry.is_dir()), reverse=True) if place.is_dir() else []
    found = [_comparison(folder, name) for name in names if not name.startswith(".")]
    return [each for each in found if each is not None][:COMPARISONS]


def _comparison(folder: Path, name: str) -> Comparison | None:
    figures = read_object(folder / COMPARE / name / "compare.json", [], expected=False)
    try:
        labels = [(str(model["title"]), folder_name(model["weights"])) for model in figures["models"]]
        first = figures["pictures"][0]
        prompt, seed = str(first["prompt"]), first["seed"]
    except (KeyError, TypeError, IndexError):
        return None
    page = f"{COMPARE}/{name}/compare.html"
    frames = [ComparedPicture(title, f"{COMPARE}/{name}/{label}/000.png") for title, label in labels]
    there = [frame for frame in frames if (folder / frame.file).is_file()]
    return Comparison(name, prompt, seed, there, page if (folder / page).is_file() else "") if there else None
