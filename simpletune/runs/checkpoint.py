"""Save and restore checkpoints: trained weights, optimizer, step and configuration, in safetensors and JSON only.

A checkpoint is written under a temporary name and renamed, so it is never partial. Its state.json is written last and
contains the SHA-256 of all files and of itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.fsdp.checkpoints import load_rows, restore_parts, write_together
from simpletune.engine.fsdp.fsdp_model import fsdp_model, local_parameters
from simpletune.engine.fsdp.rank_zero import Command, rank_zero_driver
from simpletune.engine.optim.ema import Average, use_average
from simpletune.engine.optim.options import OptimizerOption
from simpletune.engine.optim.state import state_to_tensors
from simpletune.engine.tensors import trained_parameters
from simpletune.runs.best_checkpoint import step_to_keep
from simpletune.runs.checkpoint_folders import (
    AVERAGE,
    NAME,
    OPTIMIZER,
    STATE,
    TRAINABLE,
    checkpoint_folder,
    list_checkpoints,
    read_state,
    remove_oldest,
    saved_file,
    with_checksum,
)
from simpletune.runs.figure_sums import figure_sums
from simpletune.runs.folder import read_parent, read_stacked
from simpletune.runs.model_card import shareable, usage_fields
from simpletune.runs.result import export_result
from simpletune.system.atomic import atomic_folder, quarantine, temporary_path
from simpletune.system.checksums import sha256_of
from simpletune.system.console import say
from simpletune.system.environment import NUMERIC, numeric_versions
from simpletune.system.options import Json, UserError
from simpletune.system.portable import flush_to_disk, name_inside
from simpletune.system.processes import is_first_process
from simpletune.system.redact import redact
from simpletune.system.safetensors_file import INDEX_SUFFIX, WeightReader, write_safetensors


class DamagedCheckpoint(UserError):
    """A checkpoint has changed since it was written."""


@dataclass(frozen=True)
class TrainingState:
    """The content of a checkpoint to save."""

    step: int  # finished steps
    config: TrainConfig  # as the user gave it
    model: nn.Module  # denoiser with its adapter, not wrapped
    optimizer: torch.optim.Optimizer  # not wrapped
    manifest: list[Json]  # everything that determines the order of samples (Plan.manifest)
    average: Average | None = None  # of the weights to export, if enabled
    processes: int = 1  # that train together
    fp16: Json | None = None  # Fp16.state of a run with products in fp16: the loss scale and the blocks in fp32
    base: Json = field(default_factory=dict)  # resume.base_of: what the run trains on


@dataclass(frozen=True)
class SavedState:
    """A checkpoint read from disk."""

    folder: Path
    step: int
    config: Json
    manifest: list[Json]
    optimizer: Json
    processes: int  # that trained together
    micro_batches: int | None = None  # of a step; None: from a version whose gradient_accumulation was per process
    fp16: Json | None = None  # as in TrainingState
    figures: Json = field(default_factory=dict)  # figure_sums; empty in checkpoints before November 2026
    base: Json = field(default_factory=dict)  # as in TrainingState; empty in checkpoints of 0.1.0
    versions: Json = field(default_factory=dict)  # numeric_versions; older checkpoints have torch's only


def metadata_of(run: Path, config: TrainConfig, step: int) -> dict[str, str]:
    """Build the header of every result: configuration without local folders, step, the LoRA that the run began with,
    and those under it."""
    shared = shareable(config)  # of a checkpoint's files, too, which people share as they do a result
    found = {"simpletune_config": shared.model_dump_json(by_alias=True), "simpletune_step": str(step)}
    found |= usage_fields(config)
    if (parent := read_parent(run)) is not None:
        found["simpletune_parent"] = json.dumps(parent)
    if stacked := read_stacked(run):
        found["simpletune_on_top_of"] = json.dumps(stacked)
    return found


def save_checkpoint(run: Path, state: TrainingState) -> Path:
    """Write a checkpoint and remove those that the configuration does not keep; returns its folder."""
    folder = checkpoint_folder(run, state.step)
    tensors, scalars = state_to_tensors(state.optimizer)
    averages = state.average.tensors() if state.average is not None else {}
    written = [*local_parameters(state.model).values(), *tensors.values(), *averages.values()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in written)  # bytes, without the exported file
    with atomic_folder(folder, f"saving the checkpoint of step {state.step}", needed) as part:
        metadata = metadata_of(run, state.config, state.step)
        leading = rank_zero_driver(state.model)
        if leading is None:
            write_safetensors(trained_parameters(state.model), part / TRAINABLE, metadata)
            write_safetensors(tensors, part / OPTIMIZER, {})
            if state.average is not None:
                write_safetensors(averages, part / AVERAGE, {})
        else:
            leading.tell(Command.SAVE, state.step)
            write_together(part, leading.fsdp, state.optimizer, state.average, metadata)
            scalars = {"values": {}, "shared": {}}
        if state.config.adapter.exports_to_checkpoints:
            with use_average(state.average):
                export_result(state.config, state.model, part, metadata)
        values = {
            "step": state.step,
            "config": state.config.model_dump(mode="json", by_alias=True),
            "manifest": state.manifest,
            "optimizer": scalars,
            "processes": state.processes,
            "micro_batches": state.config.train.accumulation,
            "fp16": state.fp16,
            "figures": figure_sums(run),
            "base": state.base,
            **numeric_versions(),
            "sha256": {file.name: sha256_of(file) for file in sorted(part.iterdir())},
        }
        # Last, because it has the checksums of the others.
        (part / STATE).write_text(with_checksum(values), encoding="utf-8")
        flush_to_disk(part / STATE)
    flush_to_disk(folder.parent)
    remove_oldest(run, state.config.checkpoint, step_to_keep(run))
    return folder


def save_own_part(run: Path, state: TrainingState) -> None:
    """Write this process's part of a sharded model's checkpoint, while the first process saves the rest."""
    fsdp = fsdp_model(state.model)
    assert fsdp is not None
    part, metadata = temporary_path(checkpoint_folder(run, state.step)), metadata_of(run, state.config, state.step)
    write_together(part, fsdp, state.optimizer, state.average, metadata)


def find_checkpoint(resume: str, run: Path) -> SavedState | None:
    """Find the checkpoint that ``--resume`` names: ``latest``, ``auto`` (the latest, if any), or its folder."""
    if resume == "auto":
        return find_checkpoint("latest", run) if list_checkpoints(run) else None
    if resume == "latest":
        found = list_checkpoints(run)
        if not found:
            raise UserError(f"--resume latest: {run} has no checkpoint. Start without --resume")
        for _, folder in reversed(found):
            try:
                return read_checkpoint(folder)
            except DamagedCheckpoint as error:
                if not is_first_process():  # only the first process renames
                    continue
                place = quarantine(folder)
                say(f"resume  {str(error).removeprefix('--resume: ').partition('. ')[0]}: set aside as {place}")
        raise UserError(
            f"--resume latest: all {len(found)} checkpoints of {run} are damaged and set aside. Start without --resume"
        )
    return read_checkpoint(Path(resume))


def read_checkpoint(folder: Path) -> SavedState:
    """Read a checkpoint's state and verify the checksums of its files.

    Raises:
        DamagedCheckpoint: a file is missing or damaged, or the folder's name does not match the step.
        UserError: the folder is not a checkpoint, is from an older version, or cannot be read.
    """
    older = "Use an older checkpoint: --resume PATH"
    named = NAME.match(folder.name)
    try:
        state = read_state(folder / STATE)
        fields = {name: state[name] for name in ("step", "config", "manifest", "optimizer", "processes")}
        later = {name: state[name] for name in ("micro_batches", "fp16", "figures", "base") if name in state}
        versions = {name: state[name] for name in NUMERIC if name in state}
        saved = SavedState(folder, **fields, **later, versions=versions)
        checksums = state["sha256"]
        _require_kinds(saved, checksums)
        if named and int(named[1]) != saved.step:
            raise ValueError(f"it belongs to step {saved.step}")
        # All files first: one that this user may not read is no reason to set the checkpoint aside.
        faults = {file: fault for file, checksum in checksums.items() if (fault := _fault(folder / file, checksum))}
    except FileNotFoundError:
        if named:
            raise DamagedCheckpoint(f"--resume: {folder / STATE} is missing. {older}") from None
        raise UserError(
            f"--resume: {folder} is not a checkpoint, because it has no {STATE}. Name a step-NNNNNN folder"
        ) from None
    except PermissionError as error:
        raise UserError(
            f"--resume: this user may not read {error.filename}. Grant permission, or name another checkpoint"
        ) from None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        reason = redact(str(error) if isinstance(error, ValueError) else repr(error))[:200]
        raise DamagedCheckpoint(f"--resume: {folder / STATE} is damaged ({reason}). {older}") from None
    for file, fault in faults.items():
        raise DamagedCheckpoint(f"--resume: {folder / file} is {fault}. {older}")
    return saved


def _fault(file: Path, checksum: str) -> str | None:
    """Describe what is wrong with a file of a checkpoint; None if nothing is."""
    if not file.is_file():
        return "not a file" if os.path.lexists(file) else "missing"
    try:
        return None if sha256_of(file) == checksum else "damaged"
    except PermissionError:
        raise
    except OSError as error:  # the disk cannot read it
        return f"damaged ({error.strerror})"


def _require_kinds(saved: SavedState, checksums: object) -> None:
    """Check the types of the fields of a state.json, and that its checksums are there and name no file outside."""
    if type(saved.step) is not int or not isinstance(saved.config, dict) or not isinstance(saved.manifest, list):
        raise TypeError("step, config or manifest")
    if not all(isinstance(row, dict) and {"file", "repeat"} <= set(row) for row in saved.manifest):
        raise TypeError("manifest")
    if not isinstance(saved.optimizer, dict) or not {"values", "shared"} <= set(saved.optimizer):
        raise TypeError("optimizer")
    if type(saved.processes) is not int:
        raise TypeError("processes")
    if saved.micro_batches is not None and type(saved.micro_batches) is not int:
        raise TypeError("micro_batches")
    if saved.fp16 is not None and not isinstance(saved.fp16, dict):
        raise TypeError("fp16")
    if not isinstance(saved.figures, dict):
        raise TypeError("figures")
    if not isinstance(saved.base, dict):
        raise TypeError("base")
    if not isinstance(checksums, dict):
        raise ValueError("sha256")
    if not {TRAINABLE, OPTIMIZER} <= {name.replace(INDEX_SUFFIX, ".safetensors") for name in checksums}:
        raise ValueError("sha256")
    if any(name_inside(name) is None for name in checksums):
        raise ValueError("a file outside the checkpoint")


def restore(
    saved: SavedState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    option: OptimizerOption,
    average: Average | None = None,
) -> None:
    """Restore a checkpoint's weights, average and optimizer state, bit for bit.

    Any number of processes may have written it. 8-bit state is quantised again where its blocks are divided
    differently.
    """
    weights, states, averages = (saved_file(saved.folder, name) for name in (TRAINABLE, OPTIMIZER, AVERAGE))
    reader, names = WeightReader([weights]), set(trained_parameters(model))
    if reader.names != names:
        raise UserError(f"--resume: {weights} does not fit the model: {sorted(reader.names ^ names)[:8]}")
    if fsdp_model(model) is None and states.name == OPTIMIZER:
        with torch.no_grad():
            for name, parameter in trained_parameters(model).items():
                parameter.copy_(reader.get(name))
        option.load_state(optimizer, WeightReader([states]).get_all(), saved.optimizer)
    else:
        restore_parts(model, optimizer, option, (weights, states), saved.optimizer)
    if average is not None:
        average.load(dict(load_rows(model, WeightReader([averages]))), saved.step)
