"""Checkpoints: what trains, the optimizer, the step and the configuration; safetensors and JSON only.

A checkpoint is written aside and renamed, so it is whole or it is not there. Its state.json holds the SHA-256 of its
files and of itself, and is written last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.ema import Average, averaged
from simpletune.optim.optimizer import OptimizerOption, load_state, state_to_tensors
from simpletune.options import Json, UserError
from simpletune.runs.checkpoint_folders import (
    AVERAGE,
    NAME,
    OPTIMIZER,
    STATE,
    TRAINABLE,
    checkpoint_folder,
    list_checkpoints,
    remove_oldest,
)
from simpletune.runs.state_file import DamagedCheckpoint, read_state, with_checksum
from simpletune.system.atomic import atomic_folder, flush_to_disk, quarantine
from simpletune.system.checksums import sha256_of
from simpletune.system.console import say
from simpletune.system.failpoints import failpoint
from simpletune.system.processes import is_first_process
from simpletune.system.redact import redact
from simpletune.system.safetensors_file import WeightReader, write_safetensors
from simpletune.tensors import trained_parameters


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint is made of.

    Args:
        step: how many steps are done.
        config: as the user gave it.
        model: the transformer with its adapter, not wrapped.
        optimizer: not wrapped.
        manifest: what the order of samples depends on (``Plan.manifest``).
        average: of the weights, if one is kept; it is what is exported.
        processes: how many train together.
    """

    step: int
    config: TrainConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    manifest: list[Json]
    average: Average | None = None
    processes: int = 1


@dataclass(frozen=True)
class SavedState:
    """A checkpoint as found on disk."""

    folder: Path
    step: int
    config: Json
    manifest: list[Json]
    optimizer: Json
    processes: int
    """How many trained together."""


def metadata_of(config: TrainConfig, step: int) -> dict[str, str]:
    """What goes into the header of every result: the configuration and the step."""
    return {"simpletune_config": config.model_dump_json(by_alias=True), "simpletune_step": str(step)}


def save(run: Path, state: TrainingState) -> Path:
    """Write a checkpoint and remove those that do not stay.

    Args:
        run: the run's folder.
        state: what is saved.

    Returns:
        The checkpoint's folder.
    """
    folder = checkpoint_folder(run, state.step)
    tensors, scalars = state_to_tensors(state.optimizer)
    needed = size_of_state(trained_parameters(state.model), tensors, state.average)
    with atomic_folder(folder, f"saving the checkpoint of step {state.step}", needed) as part:
        _write(part, state, tensors, scalars)
    flush_to_disk(folder.parent)
    failpoint("checkpoint.after-rename")
    remove_oldest(run, state.config.checkpoint)
    return folder


def size_of_state(
    parameters: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor], average: Average | None
) -> int:
    """Bytes of a checkpoint's tensors, without the exported form."""
    tensors = [*parameters.values(), *optimizer.values(), *(average.tensors().values() if average else ())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _write(part: Path, state: TrainingState, tensors: dict[str, torch.Tensor], scalars: Json) -> None:
    """Write the files of a checkpoint, state.json last.

    Args:
        part: the folder that is renamed when it is whole.
        state: what is saved.
        tensors: of the optimizer's state.
        scalars: the plain values of the optimizer's state.
    """
    failpoint("checkpoint.begun")
    metadata = metadata_of(state.config, state.step)
    write_safetensors(trained_parameters(state.model), part / TRAINABLE, metadata)
    failpoint("checkpoint.weights")
    write_safetensors(tensors, part / OPTIMIZER, {})
    failpoint("checkpoint.optimizer")
    if state.average is not None:
        write_safetensors(state.average.tensors(), part / AVERAGE, {})
    if state.config.adapter.exports_to_checkpoints:
        with averaged(state.average):
            state.config.adapter.export(state.model, part, metadata)
    values = {
        "step": state.step,
        "config": state.config.model_dump(mode="json", by_alias=True),
        "manifest": state.manifest,
        "optimizer": scalars,
        "processes": state.processes,
        "torch": torch.__version__,
        "sha256": {file.name: sha256_of(file) for file in sorted(part.iterdir())},
    }
    (part / STATE).write_text(with_checksum(values))
    flush_to_disk(part / STATE)
    failpoint("checkpoint.before-rename")


def find(resume: str, run: Path) -> SavedState | None:
    """The checkpoint that ``--resume`` names.

    Args:
        resume: ``latest``; ``auto``: the same, where there is one; or a checkpoint's folder.
        run: the run's folder.

    Returns:
        It; None if there is none and ``auto`` was asked for.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if resume == "auto":
        return find("latest", run) if list_checkpoints(run) else None
    if resume == "latest":
        found = list_checkpoints(run)
        if not found:
            raise UserError(f"--resume latest: {run} has no checkpoint. Start without --resume")
        for _, folder in reversed(found):
            try:
                return read(folder)
            except DamagedCheckpoint as error:
                if not is_first_process():  # which renames
                    continue
                place = quarantine(folder)
                say(f"resume  {str(error).removeprefix('--resume: ').partition('. ')[0]}: set aside as {place}")
        raise UserError(
            f"--resume latest: all {len(found)} checkpoints of {run} are damaged, and set aside. Start without --resume"
        )
    return read(Path(resume))


def read(folder: Path) -> SavedState:
    """Read a checkpoint's state and compare its files with their checksums.

    Raises:
        DamagedCheckpoint: a file is missing or damaged, or the folder has the name of another step.
        UserError: it is no checkpoint, of an older version, or may not be read.
    """
    older = "Use an older checkpoint: --resume PATH"
    named = NAME.match(folder.name)
    try:
        state = read_state(folder / STATE)
        fields = {name: state[name] for name in ("step", "config", "manifest", "optimizer", "processes")}
        saved = SavedState(folder, **fields)
        checksums = state["sha256"]
        _require_kinds(saved, checksums)
        if named and int(named[1]) != saved.step:
            raise ValueError(f"it is of step {saved.step}")
        faults = {file: fault for file, checksum in checksums.items() if (fault := _fault(folder / file, checksum))}
    except FileNotFoundError:
        if named:
            raise DamagedCheckpoint(f"--resume: {folder / STATE} is missing. {older}") from None
        raise UserError(
            f"--resume: {folder} is not a checkpoint: it has no {STATE}. Name a step-NNNNNN folder"
        ) from None
    except PermissionError as error:
        raise UserError(
            f"--resume: {error.filename} may not be read by this user. Allow it, or name another checkpoint"
        ) from None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        reason = redact(str(error) if isinstance(error, ValueError) else repr(error))[:200]
        raise DamagedCheckpoint(f"--resume: {folder / STATE} is damaged ({reason}). {older}") from None
    for file, fault in faults.items():
        raise DamagedCheckpoint(f"--resume: {folder / file} is {fault}. {older}")
    return saved


def _fault(file: Path, checksum: str) -> str | None:
    """What is wrong with a file of a checkpoint; None: nothing."""
    if not file.is_file():
        return "no file" if os.path.lexists(file) else "missing"
    try:
        return None if sha256_of(file) == checksum else "damaged"
    except PermissionError:
        raise
    except OSError as error:  # the disk cannot read it
        return f"damaged ({error.strerror})"


def _require_kinds(saved: SavedState, checksums: object) -> None:
    """The fields of a state.json are of the kinds that were written.

    Raises:
        TypeError: they are not.
        ValueError: a checksum is missing, or of a file elsewhere.
    """
    if type(saved.step) is not int or not isinstance(saved.config, dict) or not isinstance(saved.manifest, list):
        raise TypeError("step, config or manifest")
    if not all(isinstance(row, dict) and {"file", "repeat"} <= set(row) for row in saved.manifest):
        raise TypeError("manifest")
    if not isinstance(saved.optimizer, dict) or not {"values", "shared"} <= set(saved.optimizer):
        raise TypeError("optimizer")
    if type(saved.processes) is not int:
        raise TypeError("processes")
    if not isinstance(checksums, dict) or not {TRAINABLE, OPTIMIZER} <= set(checksums):
        raise ValueError("sha256")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in checksums):
        raise ValueError("a file outside of the checkpoint")


def restore(
    saved: SavedState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    option: OptimizerOption,
    average: Average | None = None,
) -> None:
    """Put a checkpoint's weights, their average and optimizer state in place, bit for bit."""
    reader = WeightReader([saved.folder / TRAINABLE])
    parameters = trained_parameters(model)
    if reader.names != set(parameters):
        raise UserError(
            f"--resume: {saved.folder / TRAINABLE} does not fit the model: {sorted(reader.names ^ set(parameters))[:8]}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(reader.get(name))
    load_state(option, optimizer, WeightReader([saved.folder / OPTIMIZER]).get_all(), saved.optimizer)
    if average is not None:
        average.load(WeightReader([saved.folder / AVERAGE]).get_all(), saved.step)
