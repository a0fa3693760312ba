"""Names on a command line: a run, one of its checkpoints (``RUN@STEP``), a LoRA, a model; a strength after a colon.

Whatever takes such a name asks here what it stands for. Imports no torch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from simpletune.adapters.lora import OUTPUT as LORA_FILE
from simpletune.config.schema import TrainConfig
from simpletune.hub.fetch import is_hub_name
from simpletune.lora.describe import file_of
from simpletune.options import UserError, shortened
from simpletune.runs.checkpoint_folders import (
    AVERAGE,
    NAME,
    STATE,
    TRAINABLE,
    checkpoint_folder,
    list_checkpoints,
)
from simpletune.runs.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS

TRANSFORMER = "transformer"
LATEST = "latest"
FORMS = "a LoRA file, a run's folder, its checkpoint (runs/demo@100), or a hub name (owner/name)"
LISTED = 16  # steps in a message


class RunName(NamedTuple):
    """A run, or one of its checkpoints.

    Args:
        folder: of the run.
        step: of the checkpoint; None: the run's result.
    """

    folder: Path
    step: int | None = None


@dataclass(frozen=True)
class Named:
    """What a name stands for: exactly one of ``lora``, ``transformer`` and ``trained``.

    Args:
        name: without the strength.
        scale: the strength, if the name has one.
        lora: a LoRA file.
        transformer: the folder of a whole transformer.
        trained: a checkpoint's file of trained weights that replace the base's; the average, where one is kept.
        run: the folder of the run that made it, if that is known.
        step: of the checkpoint; None: it is no checkpoint.
    """

    name: str
    scale: float | None = None
    lora: Path | None = None
    transformer: Path | None = None
    trained: Path | None = None
    run: Path | None = None
    step: int | None = None


def find_named(text: str, option: str = "") -> Named:
    """What a name stands for.

    Args:
        text: the name, with ``@STEP`` or ``@latest`` and ``:STRENGTH`` where it has them.
        option: that it was given by, such as ``--lora: ``; messages begin with it.

    Raises:
        UserError: there is none of that name, or a run that has no result.
    """
    try:
        name, scale = split_scale(text)
        return replace(_find(name), scale=scale)
    except UserError as error:
        raise UserError(f"{option}{error}", error.code) from None


def find_lora(text: str, option: str = "", remedy: str = "Give a LoRA", strength: bool = True) -> Named:
    """As ``find_named``, but it must be a LoRA.

    Args:
        text: the name.
        option: that it was given by.
        remedy: what to do with a full model.
        strength: whether the name may have one.

    Raises:
        UserError: there is none of that name, it is a full model, or it has a strength and may not.
    """
    named = find_named(text, option)
    if named.scale is not None and not strength:
        raise UserError(f"{option}{text}: a strength has no meaning here. Leave :{named.scale:g} out")
    if named.lora is not None:
        return named
    kind = f"is a {run_config(named.run).adapter.method} run" if named.run is not None else "is a full model"
    raise UserError(f"{option}{named.name} {kind}, not a LoRA. {remedy}")


def weight_file(name: str) -> Path:
    """The file with the weights of a run, a checkpoint, or of any folder or file.

    Raises:
        UserError: there are none.
    """
    path, run = Path(name), split_step(name)
    if run is None and not is_run(path) and not (path / STATE).exists():
        return file_of(path)
    named = find_in_run(run) if run is not None else _of_folder(path)
    return named.lora or named.trained or file_of(named.transformer or path)


def find_in_run(run: RunName) -> Named:
    """The result of a run, or what one of its checkpoints holds.

    Raises:
        UserError: it has no result.
    """
    folder, step = run
    if step is not None:
        return _of_checkpoint(checkpoint_folder(folder, step), folder, step)
    known = folder if (folder / CONFIG).is_file() else None
    if (folder / TRANSFORMER).is_dir():
        return Named(str(folder), transformer=folder / TRANSFORMER, run=known)
    if (folder / LORA_FILE).is_file():
        return Named(str(folder), lora=folder / LORA_FILE, run=known)
    raise _no_result(folder)


def find_run(text: str, option: str = "") -> RunName:
    """A run, ``RUN``, or one of its checkpoints, ``RUN@STEP`` or ``RUN@latest``.

    Args:
        text: the name.
        option: that it was given by.

    Raises:
        UserError: there is no such run or checkpoint.
    """
    try:
        return split_step(text) or RunName(Path(text))
    except UserError as error:
        raise UserError(f"{option}{error}", error.code) from None


def run_config(run: Path, option: str = "") -> TrainConfig:
    """The configuration of a run.

    Args:
        run: its folder.
        option: that it was given by.

    Raises:
        UserError: it is no run's folder.
    """
    file = run / CONFIG
    if not file.is_file():
        what = f"has no {CONFIG}: it is not a run's folder" if run.is_dir() else "does not exist"
        raise UserError(f"{option}{run} {what}. Name a run, such as runs/demo")
    try:
        return TrainConfig.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(
            f"{option}{file} is damaged, or of another version of simpletune ({first['msg']}). Name another run; "
            "train CONFIG --resume auto writes it again"
        ) from None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, finished or not."""
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in (CHECKPOINTS, METRICS, ENVIRONMENT))


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is that of a run without a result."""
    return is_run(folder) and not (folder / TRANSFORMER).is_dir() and not (folder / LORA_FILE).is_file()


def split_scale(text: str, default: float | None = None) -> tuple[str, float | None]:
    """A name and the strength after its last colon: ``my.safetensors:0.8``.

    Args:
        text: what was given.
        default: where there is no strength.

    Raises:
        UserError: what follows the name of something that exists is no number.
    """
    name, colon, scale = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, default
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return name, value
    if Path(name).exists() or split_step(name) is not None:
        raise UserError(f"{text}: {scale!r} is no strength. Give a number, as in {name}:0.8")
    return text, default


def split_step(name: str) -> RunName | None:
    """The run and the checkpoint's step of ``RUN@STEP`` or ``RUN@latest``; None: the name does not end so.

    Raises:
        UserError: there is no such run, or it has no checkpoint of that step.
    """
    before, at, step = name.rpartition("@")
    if not at or not before or Path(name).exists():
        return None
    run, meant = Path(before), step.isdecimal() or step == LATEST
    if not run.is_dir():
        if meant:
            raise UserError(f"{name}: {before} does not exist. Name a run, such as runs/demo@100")
        return None
    steps = [number for number, _ in list_checkpoints(run)]
    if not steps:
        raise UserError(f"{name}: {run} has no checkpoint")
    if step == LATEST:
        return RunName(run, steps[-1])
    if not meant:
        raise UserError(f"{name}: {step!r} is no step. {run} has checkpoints of steps {_listed(steps)}")
    if int(step) not in steps:
        raise UserError(f"{name}: there is no checkpoint of step {int(step)}. {run} has steps {_listed(steps)}")
    return RunName(run, int(step))


def _find(name: str) -> Named:
    """What a name without a strength stands for."""
    run, path = split_step(name), Path(name)
    if run is not None:
        return find_in_run(run)
    if path.is_file():
        return Named(name, lora=path)
    if path.is_dir():
        return _of_folder(path)
    if is_hub_name(name):
        from simpletune.hub.files import repository_file

        return Named(name, lora=repository_file(name, LORA_FILE))
    raise UserError(f"{name} does not exist. Give {FORMS}")


def _of_folder(folder: Path) -> Named:
    """What a folder holds: a checkpoint, a result, or a transformer."""
    if (folder / STATE).exists() or (folder / TRAINABLE).exists():
        match = NAME.match(folder.name)
        if match and folder.parent.name == CHECKPOINTS:
            return _of_checkpoint(folder, folder.parent.parent, int(match[1]))
        return _of_checkpoint(folder)
    if is_run(folder) or (folder / TRANSFORMER).is_dir() or (folder / LORA_FILE).is_file():
        return find_in_run(RunName(folder))
    if (folder / CONFIG).exists() and any(folder.glob("*.safetensors*")):
        return Named(str(folder), transformer=folder)
    raise UserError(f"{folder} holds no {LORA_FILE} and no {TRANSFORMER}/. Give {FORMS}")


def _of_checkpoint(folder: Path, run: Path | None = None, step: int | None = None) -> Named:
    """What a checkpoint holds: what its run would export, of the average where one is kept."""
    name = str(folder) if run is None else f"{run}@{step}"
    if (folder / LORA_FILE).is_file():
        return Named(name, lora=folder / LORA_FILE, run=run, step=step)
    average = folder / AVERAGE
    return Named(name, trained=average if average.is_file() else folder / TRAINABLE, run=run, step=step)


def _no_result(run: Path) -> UserError:
    """A run that is asked for its result before it has one."""
    steps = [step for step, _ in list_checkpoints(run)]
    if not steps:
        return UserError(f"{run} has no result and no checkpoint. Let it train on, or name another run")
    return UserError(
        f"{run} has no result: it is not finished. Make one of its last checkpoint with "
        f"`{shlex.join(['simpletune', 'finish', str(run)])}`, or name a checkpoint: "
        f"{shortened([f'{run}@{step}' for step in reversed(steps)], 4)}"
    )


def _listed(steps: Sequence[int]) -> str:
    """Steps in words, the newest first where there are too many."""
    return shortened([str(step) for step in (steps if len(steps) <= LISTED else steps[::-1])], LISTED)
