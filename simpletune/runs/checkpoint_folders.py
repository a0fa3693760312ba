"""Find, list and remove the checkpoint folders of a run; ``checkpoint`` reads and writes their content.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from simpletune.config.schema import Checkpoint
from simpletune.system.atomic import remove, temporary_path
from simpletune.system.safetensors_file import INDEX_SUFFIX

TRAINABLE, OPTIMIZER, STATE = "trainable.safetensors", "optimizer.safetensors", "state.json"
AVERAGE = "ema.safetensors"
NAME = re.compile(r"^step-(\d{6,})$")


def saved_file(folder: Path, name: str) -> Path:
    """Return a checkpoint's tensor file, or the index of the files that several processes have written instead."""
    index = folder / f"{name.removesuffix('.safetensors')}{INDEX_SUFFIX}"
    return index if index.is_file() else folder / name


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` steps."""
    return run / "checkpoints" / f"step-{step:06d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """List the steps and folders of a run's checkpoints, oldest first; ``checkpoint.read`` verifies them."""
    folder = run / "checkpoints"
    named = [(NAME.match(entry.name), entry) for entry in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((int(match[1]), entry) for match, entry in named if match)


def last_saved(run: Path) -> str:
    """Describe a run's last checkpoint, for messages."""
    found = list_checkpoints(run)
    return f"The last checkpoint is {found[-1][1]}" if found else "There is no checkpoint yet"


def remove_oldest(run: Path, option: Checkpoint, best: int | None = None) -> None:
    """Remove the checkpoints that the configuration does not keep.

    Args:
        run: run folder.
        option: decides which checkpoints to keep.
        best: step of the best checkpoint so far, which always stays.
    """
    found = list_checkpoints(run)
    stay = {*option.kept([step for step, _ in found]), best}
    for old in [folder for step, folder in found if step not in stay]:
        gone = temporary_path(old)  # a kill during removal must not leave half a checkpoint
        os.replace(old, gone)
        remove(gone)


def rewind(run: Path, step: int, option: Checkpoint, best: Callable[[Path], int | None]) -> list[Path]:
    """Roll the checkpoint folder back to ``step``: delete partial and surplus checkpoints, and rename later ones to
    ``*.superseded``, because the run will write them again.

    Args:
        run: run folder.
        step: step to roll back to.
        option: decides which checkpoints to keep.
        best: finds the step of the best checkpoint of a run, which stays.

    Returns:
        The new paths of later checkpoints.
    """
    for entry in (run / "checkpoints").glob(".*.part"):
        remove(entry)
    later = []
    for number, folder in list_checkpoints(run):
        if number > step:
            later.append(folder.with_name(f"{folder.name}.superseded"))
            remove(later[-1])
            os.replace(folder, later[-1])
    remove_oldest(run, option, best(run))
    return later
