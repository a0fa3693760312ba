"""Which stored run a run's folder belongs to, in its ``remote.json``."""

from __future__ import annotations

import json
from pathlib import Path

from simpletune.runs.folder import REMOTE
from simpletune.system.atomic import write_json


def linked_run(folder: Path) -> str | None:
    """Return the identity of the stored run that a folder belongs to; None if it belongs to none."""
    try:
        return str(json.loads((folder / REMOTE).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):  # without a sound record it belongs to none
        return None


def link(folder: Path, url: str, run: str) -> None:
    """Record which stored run a folder belongs to."""
    if linked_run(folder) != run:
        write_json(folder / REMOTE, {"url": url, "run": run})
