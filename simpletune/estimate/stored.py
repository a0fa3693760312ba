"""Predictions that ship with the package: those of its configurations and of common changes of them.

A row is a simulated job (``JobReport``) as JSON, in a zip file, named by a hash of the settings that the simulation
reads. The file names the versions of the libraries and a hash of the sources that it was made with
(``make predictions``); it answers nothing for other sources. Imports no torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
import zipfile
from functools import cache
from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.data.demo import MODELS
from simpletune.estimate.simulate.reports import JobReport
from simpletune.system.environment import LIBRARIES, version_or_none
from simpletune.system.options import Json
from simpletune.system.package import ASSETS, PACKAGE

FILE = ASSETS / "predictions.zip"
ABOUT = "about.json"
SOURCES = (
    "adapters", "config", "engine", "models", "stages", "estimate/simulate", "estimate/timing/recorder.py",
    "estimate/timing/sections.py", "estimate/timing/work.py", *(f"assets/{folder.name}" for folder in MODELS.values()),
)  # fmt: skip
"""What a simulation depends on: folders with their Python and JSON files, and files."""

# What a simulation does not read, or reads only as a number or text that changes no shape and no operation; every
# other field is part of a row's key.
HARMLESS = (
    "$schema", "version", "about", "name", "device", "schedule", "checkpoint", "profile", "tracking", "output",
    "train.steps", "train.epochs", "train.seed", "train.on_nonfinite", "optimizer.lr", "memory.profile",
    "speed.prefetch", "speed.threads", "prior.trigger", "prior.count",
    "adapter.start", "model.loras",
    "data.path", "data.prompt", "data.background", "data.aspect", "data.max_aspect", "data.max_upscale",
    "data.crop", "data.flip", "data.variants", "data.brightness", "data.contrast", "data.saturation", "data.hue",
    "data.rotation", "data.repeats", "data.caption_lines", "data.caption_prefix", "data.caption_suffix",
    "data.shuffle_tags", "data.tag_dropout", "data.keep_tags", "data.tag_separator", "data.caption_dropout",
    "data.on_error", "data.source", "data.captions", "data.folder_names", "data.links", "data.reading", "data.split",
    "data.missing_prompt",
    "validation.negative_prompt", "validation.every", "validation.seed", "validation.class_prompt",
    "validation.unrelated_prompts", "validation.split", "validation.early_stop",
)  # fmt: skip

LATER: dict[str, object] = {
    "adapter.layers": [], "adapter.conv_rank": None, "adapter.conv_alpha": None, "model.inpainting": False,
    "data.inpainting_mask": "random", "data.inpainting_loss": "everywhere", "validation.images": None,
    "validation.masks": None, "concept": None, "speed.graphs": "auto",
    "memory.host_weights": "pinned", "objective.levels": None,
}  # fmt: skip
"""Fields that were added later, with the values that change nothing: these keep the keys from before."""


def prediction_key(config: TrainConfig, attention: str, processes: int = 1) -> str:
    """Hash the settings that the simulation of a square image reads.

    Args:
        config: demo names and whatever is auto resolved.
        attention: ``attention_of`` the device.
        processes: number of processes that shard the weights.
    """
    options = config.model_dump(mode="json", by_alias=True)
    for path in HARMLESS:
        section, _, name = path.rpartition(".")
        part = options.get(section) if section else options
        if isinstance(part, dict):  # several sources are a list
            part.pop(name, None)
    for path, usual in LATER.items():
        section, _, name = path.rpartition(".")
        part = options[section] if section else options
        if isinstance(part, dict) and part.get(name, usual) == usual:
            part.pop(name, None)
    options["precision"]["compute"] = config.precision.settled_compute
    options["validation"]["prompts"] = config.validation.prompts != []
    options["prior"]["prompt"] = getattr(config.prior, "prompt", None) is not None
    about = json.dumps([options, attention, processes], sort_keys=True)
    return hashlib.sha256(about.replace(str(ASSETS), "assets:").encode()).hexdigest()[:24]


def stored_job(key: str) -> JobReport | None:
    """Return the simulated job of a key, by whatever versions; None if it is not stored, or the sources have
    changed."""
    if not is_current(FILE):
        return None
    with zipfile.ZipFile(FILE) as rows:
        name = f"{key}.json"
        return JobReport.from_json(json.loads(rows.read(name))) if name in rows.NameToInfo else None


def other_versions() -> dict[str, str | None]:
    """Return the versions that the stored predictions are for, of the libraries that are installed in another."""
    stored = read_about(FILE).get("versions", {})
    return {name: stored.get(name) for name, own in versions().items() if stored.get(name) != own}


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries, without the build."""
    # a build does not change the simulation, on the CPU
    return {name: found.partition("+")[0] for name in LIBRARIES if (found := version_or_none(name)) is not None}


@cache
def is_current(file: Path) -> bool:
    """Return whether a file was made with today's sources. Parses them only if their bytes have changed."""
    made = read_about(file)
    return bool(made) and (made["bytes"] == hash_sources(parsed=False) or made["sources"] == hash_sources())


@cache
def read_about(file: Path) -> Json:
    """Return what a file's rows were made with; empty without the file."""
    if not file.exists():
        return {}
    with zipfile.ZipFile(file) as rows:
        return dict(json.loads(rows.read(ABOUT)))


def hash_sources(parsed: bool = True, root: Path = PACKAGE) -> str:
    """Hash what a simulation depends on; ``parsed``: without comments, docstrings and layout."""
    found = hashlib.sha256()
    for place in (root / source for source in SOURCES):
        files = [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.json")])
        for file in files:
            content = file.read_bytes()
            found.update(file.relative_to(root).as_posix().encode())
            found.update(_without_words(content) if parsed and file.suffix == ".py" else content)
    return found.hexdigest()[:24]


def _without_words(source: bytes) -> bytes:
    """Return a module's syntax tree as text, without docstrings and other loose strings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_string(each)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
