"""Restrict the files in a form's configuration to the page's roots, and make their paths absolute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

from simpletune.config.schema import DEMO
from simpletune.system.hub import HUB_NAME
from simpletune.system.options import Json, Problem, UserError

Resolve = Callable[[str], Path]
"""Resolves a path inside of the roots.

Raises:
    UserError: the path lies outside.
"""
MODEL_PARTS = ("pretrained", "transformer", "unet", "vae", "text_encoders")
OUTPUT = ("profiles", "cache", "prices")


def absolute_paths(data: Json, resolve: Resolve, runs: Path) -> tuple[Json, list[Problem]]:
    """Make a configuration's paths absolute, and set its runs' folder to the page's.

    Args:
        data: the configuration's JSON.
        resolve: the roots' ``resolve``.
        runs: folder of the runs.

    Returns:
        The changed JSON, and a problem for each path outside of the roots.
    """
    data, problems = copy.deepcopy(data), []
    for section, key, path in _places(data):
        text = section[key]
        if text.startswith(DEMO) or not text:
            continue
        try:
            found = resolve(text)
        except UserError as error:
            if not _is_of_hub(text, path) or _lies_here(text, resolve):
                problems.append(Problem(path, str(error)))
            continue
        if found.exists() or not _is_of_hub(text, path):
            section[key] = str(found)
    output = data.setdefault("output", {})
    if isinstance(output, dict):
        output["runs"] = str(runs)
    return data, problems


def _places(data: Json) -> Iterator[tuple[Json, str, str]]:
    """Yield (section, key, path) of every text that names a file or folder."""
    found: list[tuple[object, str, tuple[str, ...]]] = [
        (data.get("data"), "data", ("path", "mask_path")),
        (data.get("model"), "model", MODEL_PARTS),
        (data.get("output"), "output", OUTPUT),
    ]
    own = data.get("data")
    sources = own.get("sources") if isinstance(own, dict) else None
    for number, source in enumerate(sources if isinstance(sources, list) else ()):
        found.append((source, f"data.sources.{number}", ("path", "mask_path")))
    for section, name, keys in found:
        for key in keys:
            if isinstance(section, dict) and isinstance(section.get(key), str):
                yield section, key, f"{name}.{key}"


def _is_of_hub(text: str, path: str) -> bool:
    """Return whether a text may be a repository on the hub, of a model or a data set."""
    return path.startswith(("model.", "data.")) and not path.endswith("mask_path") and bool(HUB_NAME.match(text))


def _lies_here(text: str, resolve: Resolve) -> bool:
    """Return whether a relative path exists in the first root, even if only as a link out of it."""
    try:
        return (resolve(".") / text).exists()
    except (OSError, UserError):
        return False
