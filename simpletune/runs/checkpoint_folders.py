"""The folders of a run's checkpoints: which there are, and which stay. ``checkpoint`` reads and writes what is in them.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from simpletune.config.checkpoints import Checkpoint
from simpletune.system.atomic import remove, temporary_path
from simpletune.system.failpoints import failpoint

TRAINABLE, OPTIMIZER, STATE = "trainable.safetensors", "optimizer.safetensors", "state.json"
AVERAGE = "ema.safetensors"
NAME = re.compile(r"^step-(\d{6,})$")


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """What has a checkpoint's name in a run, oldest first; ``checkpoint.read`` tells whether it is whole."""
    folder = run / "checkpoints"
    named = [(NAME.match(entry.name), entry) for entry in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((int(match[1]), entry) for match, entry in named if match)


def remove_oldest(run: Path, option: Checkpoint) -> None:
    """Remove the checkpoints of a run that do not stay.

    Args:
        run: the run's folder.
        option: says which stay.
    """
    found = list_checkpoints(run)
    stay = set(option.kept([step for step, _ in found]))
    for old in [folder for step, folder in found if step not in stay]:
        gone = temporary_path(old)  # a kill while files are removed must not leave half a checkpoint
        os.replace(old, gone)
        failpoint("checkpoint.removing")
        remove(gone)


def rewind(run: Path, step: int, option: Checkpoint) -> list[Path]:
    """Make a run's checkpoints those of a run that is at ``step``: what a kill left half written is removed, what it
    left too many too, and later checkpoints, which the run will write again, get another name.

    Args:
        run: the run's folder.
        step: steps done.
        option: says which checkpoints stay.

    Returns:
        The later ones, as they are called now.
    """
    for entry in (run / "checkpoints").glob(".*.part"):
        remove(entry)
    later = []
    for number, folder in list_checkpoints(run):
        if number > step:
            later.append(folder.with_name(f"{folder.name}.superseded"))
            remove(later[-1])
            os.replace(folder, later[-1])
    remove_oldest(run, option)
    return later
