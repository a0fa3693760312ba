"""Record which stored run a run's folder belongs to, in its ``remote.json``."""

from __future__ import annotations

import json
from pathlib import Path

from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import REMOTE
from simpletune.system.atomic import write_json
from simpletune.system.options import UserError


def linked_run(folder: Path) -> str | None:
    """Return the identity of the stored run that a folder belongs to; None if it belongs to none."""
    try:
        return str(json.loads((folder / REMOTE).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):  # without an intact record it belongs to none
        return None


def require_same_run(folder: Path, url: str, run: str) -> None:
    """Check that a folder with checkpoints belongs to a stored run.

    Raises:
        UserError: it belongs to another run, or to none.
    """
    if list_checkpoints(folder) and linked_run(folder) != run:
        raise UserError(
            f"--resume: {folder} is not the run that {url} holds. Move the folder away to continue the stored one, or "
            "give this run another name: name=..."
        )


def link(folder: Path, url: str, run: str) -> None:
    """Record which stored run a folder belongs to."""
    if linked_run(folder) != run:
        write_json(folder / REMOTE, {"url": url, "run": run})
