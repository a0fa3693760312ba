"""Resolve names on the command line: a run, a checkpoint (``RUN@STEP``), a LoRA or a model, with an optional strength.

Every verb resolves such names here. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from pydantic import ValidationError

from simpletune.adapters.files.describe import find_weight_file
from simpletune.adapters.files.header import LARGEST_SCALE
from simpletune.adapters.methods.adapter import OUTPUT as LORA_FILE
from simpletune.adapters.text.embedding_files import embeddings_in
from simpletune.config.load import read_saved
from simpletune.config.schema import TrainConfig
from simpletune.models.families import DENOISERS, denoiser_in
from simpletune.runs.best_checkpoint import choose_best
from simpletune.runs.checkpoint_folders import (
    AVERAGE,
    NAME,
    STATE,
    TRAINABLE,
    checkpoint_folder,
    list_checkpoints,
    saved_file,
)
from simpletune.runs.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS
from simpletune.system.hub import hub_file, is_hub_name
from simpletune.system.options import UserError, join_names
from simpletune.system.shell import quote_command

LATEST, BEST = "latest", "best"
FORMS = "a LoRA file, a run's folder, a checkpoint (runs/demo@100) or a hub name (owner/name, or owner/name/FILE)"
LISTED = 16  # steps in a message


class CheckpointRef(NamedTuple):
    """A run's result, or one of its checkpoints."""

    folder: Path
    step: int | None = None  # None: the result
    strength: float = 1.0  # of its LoRA, at which ``@best`` was chosen


@dataclass(frozen=True)
class WeightsRef:
    """What a name refers to: one of ``lora``, ``denoiser`` and ``trained``, or embeddings alone."""

    name: str  # without the strength
    scale: float | None = None  # strength, if given
    lora: Path | None = None
    denoiser: Path | None = None  # folder of a whole denoiser
    trained: Path | None = None  # checkpoint file of trained weights; the average's, if the run keeps one
    run: Path | None = None  # folder of the run that made it, if known
    step: int | None = None  # of the checkpoint; None: it is none
    embeddings: tuple[Path, ...] = ()  # files of the run's embeddings

    @property
    def is_text_alone(self) -> bool:
        """Whether the base is unchanged except for embeddings."""
        return self.lora is None and self.denoiser is None and self.trained is None


def find_named(text: str, option: str = "") -> WeightsRef:
    """Resolve a name with optional ``@STEP``, ``@best`` or ``@latest`` and ``:STRENGTH``. Raises UserError, which
    begins with ``option`` (such as ``--lora: ``), if nothing has that name or the run has no result."""
    try:
        name, scale = split_scale(text)
        named = _find(name)
        return named if scale is None else replace(named, scale=scale)
    except UserError as error:
        raise UserError(f"{option}{error}", error.code) from None


def find_lora(text: str, option: str = "", remedy: str = "Give a LoRA", strength: bool = True) -> WeightsRef:
    """Resolve a name that must be a LoRA; ``option`` is the prefix of messages, ``remedy`` the advice if the name is a
    full model, ``strength`` whether one is accepted."""
    named = find_named(text, option)
    if named.scale is not None and not strength:
        if split_scale(text)[1] is None:
            refuse_strength(text, named.name, named.scale, option)
        raise UserError(f"{option}{text}: this command takes no strength. Remove :{named.scale:g}")
    if named.lora is not None:
        return named
    if named.is_text_alone:
        raise UserError(f"{option}{named.name} has embeddings but no LoRA. Use --embedding {named.embeddings[0]}")
    kind = f"is a {run_config(named.run).adapter.method} run" if named.run is not None else "is a full model"
    raise UserError(f"{option}{named.name} {kind}, not a LoRA. {remedy}")


def weight_file(name: str) -> Path:
    """Find the weights file of a run, a checkpoint, a folder or a file."""
    path, run = Path(name), split_step(name)
    if run is None and not is_run(path) and not (path / STATE).exists():
        return find_weight_file(path)
    named = find_in_run(run) if run is not None else _resolve_folder(path)
    first = named.embeddings[0] if named.is_text_alone else named.lora or named.trained
    return first or find_weight_file(named.denoiser or path)


def find_in_run(run: CheckpointRef) -> WeightsRef:
    """Resolve the result of a run or one of its checkpoints. Raises UserError if the run has no result."""
    folder, step, strength = run
    if step is not None:
        saved = _resolve_checkpoint(checkpoint_folder(folder, step), folder, step)
        return saved if strength == 1 or saved.lora is None else replace(saved, scale=strength)
    known, embeddings = folder if (folder / CONFIG).is_file() else None, tuple(embeddings_in(folder))
    if (whole := denoiser_in(folder)) is not None:
        return WeightsRef(str(folder), denoiser=whole, run=known, embeddings=embeddings)
    lora = folder / LORA_FILE if (folder / LORA_FILE).is_file() else None
    if lora is not None or embeddings:
        return WeightsRef(str(folder), lora=lora, run=known, embeddings=embeddings)
    if not (steps := [step for step, _ in list_checkpoints(folder)]):
        raise UserError(f"{folder} has no result and no checkpoint. Continue training it, or name another run")
    raise UserError(
        f"{folder} has no result, because it is unfinished. Export its last checkpoint with "
        f"`{quote_command('simpletune', 'control', folder, '--finish')}`, or name a checkpoint: "
        f"{join_names([f'{folder}@{step}' for step in reversed(steps)], 4)}"
    )


def find_run(text: str, option: str = "", strength: bool = False) -> CheckpointRef:
    """Find a run, ``RUN``, or a checkpoint, ``RUN@STEP``, ``RUN@best`` or ``RUN@latest``; ``strength`` is whether a
    best checkpoint may have been chosen at a strength."""
    try:
        named = split_step(text) or CheckpointRef(Path(text))
    except UserError as error:
        raise UserError(f"{option}{error}", error.code) from None
    if named.strength != 1 and not strength:
        refuse_strength(text, f"{named.folder}@{named.step}", named.strength, option)
    return named


def find_whole_run(text: str, why: str) -> Path:
    """Find the folder of a run where a checkpoint makes no sense; ``why`` says so in messages."""
    named = find_run(text, strength=True)
    if named.step is not None:
        raise UserError(f"{text}: {why}. Name the run: {named.folder}")
    return named.folder


def refuse_strength(text: str, checkpoint: str, strength: float, option: str = "") -> NoReturn:
    """Refuse a best checkpoint that was chosen at a strength, where none can be applied."""
    raise UserError(
        f"{option}{text} is {checkpoint} at a strength of {strength:g}, and this command takes no strength. Name "
        f"{checkpoint}"
    )


def run_config(run: Path, option: str = "") -> TrainConfig:
    """Read the configuration of a run. Raises UserError, which begins with ``option``, if the folder is none."""
    file = run / CONFIG
    if not file.is_file():
        what = f"is not a run's folder: it has no {CONFIG}" if run.is_dir() else "does not exist"
        raise UserError(f"{option}{run} {what}. Name a run, such as runs/demo")
    try:
        return read_saved(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(
            f"{option}{file} is damaged or from another version of simpletune ({first['msg']}). Name another run, or "
            "write it again with train CONFIG --resume auto"
        ) from None


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, finished or not; a model's folder has a ``config.json``, too."""
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in (CHECKPOINTS, METRICS, ENVIRONMENT))


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder is a run's without a result."""
    return is_run(folder) and not (denoiser_in(folder) or (folder / LORA_FILE).is_file() or embeddings_in(folder))


def split_scale(text: str) -> tuple[str, float | None]:
    """Split a name from the strength after its last colon, if any: ``my.safetensors:0.8``."""
    name, colon, scale = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, None
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if abs(value) <= LARGEST_SCALE:
        return name, value
    if Path(name).exists() or split_step(name) is not None:
        rule = f"a number from -{LARGEST_SCALE:.0f} to {LARGEST_SCALE:.0f}"
        raise UserError(f"{text}: the strength {scale!r} is not {rule}. Write one, as in {name}:0.8")
    return text, None


def split_step(name: str) -> CheckpointRef | None:
    """Split ``RUN@STEP``, ``RUN@best`` or ``RUN@latest`` into run and step; None if the name has no such suffix. Raises
    UserError if there is no such run or checkpoint."""
    before, at, step = name.rpartition("@")
    if not at or not before or Path(name).exists():
        return None
    run, meant = Path(before), step.isdecimal() or step in (LATEST, BEST)
    if not run.is_dir():
        if meant:
            raise UserError(f"{name}: {before} does not exist. Name a run, such as runs/demo@100")
        return None
    steps = [number for number, _ in list_checkpoints(run)]
    if not steps:
        raise UserError(f"{name}: {run} has no checkpoint. Name another run")
    if step == LATEST:
        return CheckpointRef(run, steps[-1])
    if step == BEST:
        best = choose_best(run)
        return CheckpointRef(run, steps[-1]) if best is None else CheckpointRef(run, best.step, best.strength)
    if not meant:
        raise UserError(f"{name}: {step!r} is not a step. Use one of {_list_names(steps)}")
    if int(step) not in steps:
        why = _explain_gone(run, int(step), steps)
        raise UserError(f"{name}: {run} has no checkpoint of step {int(step)}{why}. Use one of {_list_names(steps)}")
    return CheckpointRef(run, int(step))


def _explain_gone(run: Path, step: int, steps: list[int]) -> str:
    """Explain why a run has no checkpoint of a step that it saved; empty if it has not."""
    if not (run / CONFIG).is_file():
        return ""
    option = run_config(run).checkpoint
    if (
        option.every is None
        or step % option.every
        or step > steps[-1]
        or step in option.steps_to_keep(sorted((*steps, step)))
    ):
        return ""
    return f": it was removed as later ones were saved, because the run keeps its last {option.keep_last}"


def _find(name: str) -> WeightsRef:
    """Resolve a name without a strength."""
    run, path = split_step(name), Path(name)
    if run is not None:
        return find_in_run(run)
    if path.is_file():
        return WeightsRef(name, lora=path)
    if path.is_dir():
        return _resolve_folder(path)
    if is_hub_name(name) and not path.parent.is_dir():  # runs/typo is not on the hub
        from simpletune.system.hub import repository_file

        return WeightsRef(name, lora=repository_file(name, LORA_FILE))
    if (there := hub_file(name)) is not None:
        from simpletune.system.hub import repository_file

        return WeightsRef(name, lora=repository_file(*there))
    raise UserError(f"{name} does not exist. Give {FORMS}")


def _resolve_folder(folder: Path) -> WeightsRef:
    """Resolve a folder with a checkpoint, a result or a denoiser."""
    if (folder / STATE).exists() or saved_file(folder, TRAINABLE).exists():
        match = NAME.match(folder.name)
        if match and folder.parent.name == CHECKPOINTS:
            return _resolve_checkpoint(folder, folder.parent.parent, int(match[1]))
        return _resolve_checkpoint(folder)
    if is_run(folder) or denoiser_in(folder) is not None or (folder / LORA_FILE).is_file():
        return find_in_run(CheckpointRef(folder))
    if (folder / CONFIG).exists() and any(folder.glob("*.safetensors*")):
        return WeightsRef(str(folder), denoiser=folder)
    raise UserError(f"{folder} contains neither {LORA_FILE} nor {'/ nor '.join(DENOISERS)}/. Give {FORMS}")


def _resolve_checkpoint(folder: Path, run: Path | None = None, step: int | None = None) -> WeightsRef:
    """Resolve a checkpoint to what its run would export: the average, if the run keeps one."""
    name, embeddings = str(folder) if run is None else f"{run}@{step}", tuple(embeddings_in(folder))
    lora = folder / LORA_FILE if (folder / LORA_FILE).is_file() else None
    if lora is not None or embeddings:
        return WeightsRef(name, lora=lora, run=run, step=step, embeddings=embeddings)
    average = saved_file(folder, AVERAGE)
    trained = average if average.is_file() else saved_file(folder, TRAINABLE)
    return WeightsRef(name, trained=trained, run=run, step=step)


def _list_names(steps: Sequence[int]) -> str:
    """List steps; if there are too many, the newest first."""
    return join_names([str(step) for step in (steps if len(steps) <= LISTED else steps[::-1])], LISTED)
