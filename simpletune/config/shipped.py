"""The configurations that come with the package, by name: ``simpletune train demo``."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "configs"
"""In a checkout a link to ``configs/``, in an installed package a folder."""


def shipped_names() -> list[str]:
    """Names of the shipped configurations: their files without ``.json``."""
    return sorted(file.stem for file in FOLDER.glob("*.json") if file.name != "schema.json")


def find_config(file: Path) -> Path:
    """Find a configuration by path or by name.

    Args:
        file: a path, or the name of a shipped configuration. A file of that name in the current folder wins.

    Returns:
        The shipped file if ``file`` is a bare name that no file has; otherwise ``file``.
    """
    is_name = file.name == str(file) and file.name in shipped_names()
    return FOLDER / f"{file.name}.json" if is_name and (file.is_dir() or not file.exists()) else file


def missing_config(file: Path) -> str:
    """Say that a file does not exist, which one may be meant, and which configurations come with the package."""
    names = shipped_names()
    meant = {**{name: name for name in names}, **{near.stem: str(near) for near in file.parent.glob("*.json")}}
    near = difflib.get_close_matches(file.stem, meant, n=1)
    hint = f" Did you mean {meant[near[0]]}?" if near else ""
    return (
        f"{file}: there is no such file.{hint} Give the path of a JSON file or the name of a shipped configuration: "
        f"{', '.join(names)}"
    )
