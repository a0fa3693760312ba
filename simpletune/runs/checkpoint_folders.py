"""Find, list and remove the checkpoint folders of a run, and protect their state.json; ``checkpoint`` reads and writes
their content. Imports no torch.

The last value of a state.json is the SHA-256 of all bytes before it, so a change of any byte is detected.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from simpletune.config.checkpoint import Checkpoint
from simpletune.config.schema import TrainConfig, run_folder, run_url
from simpletune.system.atomic import remove, temporary_path
from simpletune.system.options import Json, UserError, join_names
from simpletune.system.portable import replace
from simpletune.system.processes import is_first_process
from simpletune.system.safetensors_file import INDEX_SUFFIX

TRAINABLE, OPTIMIZER, STATE = "trainable.safetensors", "optimizer.safetensors", "state.json"
AVERAGE = "ema.safetensors"
NAME = re.compile(r"^step-(\d{6,})$")
CHECKSUM = "state_sha256"
_END = re.compile(rf', "{CHECKSUM}": "([0-9a-f]{{64}})"\}}\Z'.encode())
_UNCHECKED = {"step", "config", "manifest", "optimizer", "processes", "torch", "sha256"}  # keys without a checksum


def saved_file(folder: Path, name: str) -> Path:
    """Return a checkpoint's tensor file, or the index of the files that several processes have written instead."""
    index = folder / f"{name.removesuffix('.safetensors')}{INDEX_SUFFIX}"
    return index if index.is_file() else folder / name


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """List the steps and folders of a run's checkpoints, oldest first; ``checkpoint.read`` verifies them."""
    folder = run / "checkpoints"
    named = [(NAME.match(entry.name), entry) for entry in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((int(match[1]), entry) for match, entry in named if match)


def require_resumable(config: TrainConfig, resume: str | None) -> None:
    """Refuse, before torch is imported, a run that another process holds, and what ``--resume`` cannot mean; what a
    checkpoint holds is looked at later, and so is a run in an object store.

    Raises:
        UserError: the run is in use, it has no checkpoint, or the named folder is none.
    """
    from simpletune.system.locks import exclusive, is_held  # filelock is 20 modules, which `check` does not need

    run = run_folder(config)
    if is_first_process() and is_held(run):
        with exclusive(run):  # refuses by the number of the process that holds it
            pass
    if resume is None or resume == "auto" or run_url(config) is not None:
        return
    if resume == "latest":
        if not list_checkpoints(run):
            raise UserError(f"--resume latest: {run} has no checkpoint. Start without --resume")
        return
    folder = Path(resume)
    if NAME.match(folder.name) and folder.is_dir() or (folder / STATE).exists():
        return
    saved = [str(each) for _, each in list_checkpoints(folder if list_checkpoints(folder) else run)]
    what = "is not a checkpoint" if folder.exists() else "does not exist"
    near = difflib.get_close_matches(resume, ["latest", "auto", *saved], n=1)
    hint = f"Did you mean {near[0]}?" if near else "Use latest, auto or a checkpoint's folder."
    named = f" The run has {join_names(saved, 6)}" if saved else ""
    raise UserError(f"--resume: {resume} {what}. {hint}{named}")


def last_saved(run: Path) -> str:
    """Describe a run's last checkpoint, for messages."""
    found = list_checkpoints(run)
    return f"The last checkpoint is {found[-1][1]}" if found else "There is no checkpoint yet"


def remove_oldest(run: Path, option: Checkpoint, best: int | None = None) -> None:
    """Remove the checkpoints that the configuration does not keep; ``best``, the best one's step, always stays."""
    found = list_checkpoints(run)
    stay = {*option.steps_to_keep([step for step, _ in found]), best}
    for old in [folder for step, folder in found if step not in stay]:
        gone = temporary_path(old)  # a kill during removal must not leave half a checkpoint
        replace(old, gone)
        remove(gone)


def rewind(run: Path, step: int, option: Checkpoint, best: Callable[[Path], int | None]) -> list[Path]:
    """Roll the checkpoint folder back to ``step``: delete partial and surplus checkpoints, and rename later ones to
    ``*.superseded``, because the run will write them again; returns their new paths. ``best`` finds the step of a run's
    best checkpoint, which stays.
    """
    for entry in (run / "checkpoints").glob(".*.part"):
        remove(entry)
    later = []
    for number, folder in list_checkpoints(run):
        if number > step:
            later.append(folder.with_name(f"{folder.name}.superseded"))
            remove(later[-1])
            replace(folder, later[-1])
    remove_oldest(run, option, best(run))
    return later


def with_checksum(values: Json) -> str:
    """Serialise the values of a state.json."""
    text = json.dumps(values)
    return f'{text[:-1]}, "{CHECKSUM}": "{hashlib.sha256(text[:-1].encode()).hexdigest()}"}}'


def read_state(file: Path) -> Json:
    """Read the values of a state.json.

    Raises:
        ValueError: the file has changed since it was written.
        UserError: an older version wrote the file, without a checksum.
    """
    data = file.read_bytes()
    end = _END.search(data)
    if end is None:
        values = json.loads(data)
        if isinstance(values, dict) and set(values) == _UNCHECKED:  # in a damaged file, the checksum's key is broken
            raise UserError(
                f"--resume: {file} has no checksum, because an older version of simpletune wrote it, so damage could "
                "go unnoticed. Continue with that version, or start a new run under another name"
            )
        raise ValueError("its checksum is missing")
    if hashlib.sha256(data[: end.start()]).hexdigest().encode() != end[1]:
        raise ValueError("its checksum does not match")
    state: Json = json.loads(data)
    return state
