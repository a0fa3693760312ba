"""Find the shipped configurations by name, as in ``simpletune train demo``."""

from __future__ import annotations

import difflib
from pathlib import Path

from simpletune.system.package import PACKAGE

FOLDER = PACKAGE / "configs"
"""Link to ``configs/`` in a checkout; folder in an installed package."""


def shipped_names() -> list[str]:
    """List the names of the shipped configurations: file names without ``.json``."""
    return sorted(file.stem for file in FOLDER.glob("*.json") if file.name != "schema.json")


def find_config(file: Path) -> Path:
    """Find a configuration by path or by name.

    Args:
        file: a path or the name of a shipped configuration. A file in the current folder takes precedence.

    Returns:
        The shipped file if ``file`` is the name of a shipped configuration and no such file exists, else ``file``.
    """
    is_name = file.name == str(file) and file.name in shipped_names()
    return FOLDER / f"{file.name}.json" if is_name and (file.is_dir() or not file.exists()) else file


def missing_config(file: Path) -> str:
    """Report a missing file, with the nearest match and the shipped configurations."""
    names = shipped_names()
    meant = {**{name: name for name in names}, **{near.stem: str(near) for near in file.parent.glob("*.json")}}
    near = difflib.get_close_matches(file.stem, meant, n=1)
    hint = f" Did you mean {meant[near[0]]}?" if near else ""
    return (
        f"{file} does not exist.{hint} Give the path of a JSON file or the name of a shipped configuration: "
        f"{', '.join(names)}"
    )
