"""Save a sharded model's checkpoint in all processes, and restore any checkpoint into a model, sharded or not.

Not with ``torch.distributed.checkpoint``: it divides only ``DTensor``s anew, but 8-bit state has a scale for each block
of elements, and it computes no checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import distributed, nn

from simpletune.engine.fsdp.files import SavedStates, restore_states, state_by_name, write_index, write_parts
from simpletune.engine.fsdp.fsdp_model import FsdpModel, fsdp_model, held_parameters
from simpletune.engine.optim.ema import Average
from simpletune.engine.optim.optimizer import OptimizerOption
from simpletune.engine.optim.place import ParameterRange
from simpletune.engine.tensors import trained_parameters
from simpletune.system.options import Json, UserError, join_names
from simpletune.system.safetensors_file import WeightReader

LISTED = 4
WEIGHTS, STATES, AVERAGES = "trainable", "optimizer", "ema"


def write_together(
    folder: Path,
    fsdp: FsdpModel,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    metadata: dict[str, str],
) -> None:
    """Write every process's parts in that process; the first process then writes the indices.

    Args:
        folder: the checkpoint's folder, under its temporary name; all processes see it.
        metadata: strings for the headers of the weights.

    Raises:
        UserError: in the first process, if any process failed.
    """
    written: Json = {}
    try:
        bad = nonfinite(fsdp)
        written = {"bad": bad} if bad else _write_own(folder, fsdp, optimizer, average, metadata)
    except (OSError, UserError) as error:
        written = {"error": str(error), "code": error.code if isinstance(error, UserError) else 1}
    every: list[Json] = gather_object([written])
    if fsdp.rank:
        return
    require_written(every, folder)
    for kind in every[0]:
        write_index(folder, kind, [each[kind] for each in every], fsdp.shards)


def nonfinite(fsdp: FsdpModel) -> list[str]:
    """The names of the parameters with NaN or infinity in this process's parts."""
    held = fsdp.held
    peaks = [torch.linalg.vector_norm(part.detach(), torch.inf).float() for part in held.values()]
    finite = torch.stack(peaks).isfinite().tolist() if peaks else []
    return [name for name, fine in zip(held, finite, strict=True) if not fine]


def _write_own(
    folder: Path,
    fsdp: FsdpModel,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    metadata: dict[str, str],
) -> Json:
    """Write this process's files; return their names and checksums by kind."""
    held, of = fsdp.held, (fsdp.rank, fsdp.processes)
    written: Json = {WEIGHTS: write_parts(folder, WEIGHTS, held, metadata, of)}
    states, values = state_by_name(optimizer, list(held))
    written[STATES] = write_parts(folder, STATES, states, values, of)
    if average is not None:
        written[AVERAGES] = write_parts(folder, AVERAGES, average.tensors(), {}, of)
    return written


def require_written(every: list[Json], folder: Path) -> None:
    """Raise the first process's failure to write its part, and before it what is non-finite in any of them."""
    bad = list(dict.fromkeys(name for each in every for name in each.get("bad", [])))
    if bad:
        raise NonFinite(bad)
    failed = {rank: each for rank, each in enumerate(every) if "error" in each}
    if failed:
        rank, each = next(iter(failed.items()))
        raise UserError(f"process {rank} could not write its part of {folder.name}: {each['error']}", each["code"])


class NonFinite(UserError):
    """Reports parameters that are not finite, in any process, by their names."""

    def __init__(self, names: list[str]):
        super().__init__(f"{len(names)} trained parameters are non-finite ({join_names(names, LISTED)})")
        self.names = names


def restore_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, option: OptimizerOption, files: tuple[Path, Path], scalars: Json
) -> None:
    """Restore weights and optimizer state that any number of processes has written, into a model, sharded or not.

    Args:
        optimizer: the optimizer of what ``held_parameters`` returns.
        files: the files of the weights and of the state: the indices, or the one file.
        scalars: other values of the state, for a checkpoint in one file.
    """
    held, whole = held_parameters(model), trained_parameters(model)
    with torch.no_grad():
        for name, rows in held_rows(model, WeightReader([files[0]])):
            held[name].copy_(rows)
    sizes = {name: parameter.numel() for name, parameter in whole.items()}
    restore_states(option, optimizer, parameter_ranges(model), SavedStates(files[1], sizes, scalars))


def held_rows(model: nn.Module, reader: WeightReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Load this process's rows of each trained parameter, one after the other."""
    fsdp = fsdp_model(model)
    for name, parameter in held_parameters(model).items():
        if fsdp is None:
            yield name, reader.get(name)
        else:
            first = fsdp.shards[name].place.start // (parameter.numel() // len(parameter))
            yield name, reader.rows(name, first, first + len(parameter))


def parameter_ranges(model: nn.Module) -> dict[str, ParameterRange]:
    """The places, in the whole parameters, of the parts that this process updates, by name."""
    fsdp = fsdp_model(model)
    if fsdp is not None:
        return dict(zip(fsdp.held, fsdp.places, strict=True))
    parameters = trained_parameters(model).items()
    return {name: ParameterRange(number, 0, parameter.numel()) for number, (name, parameter) in enumerate(parameters)}


def require_shared(folder: Path, fsdp: FsdpModel) -> None:
    """Check that all processes see the run's folder, into which each writes its part of a checkpoint; it exists in the
    first process."""
    mark = folder / ".fsdp.part"
    if fsdp.rank == 0:
        mark.touch()
    distributed.barrier()
    seen: list[bool] = gather_object([mark.exists()])
    if fsdp.rank == 0:
        mark.unlink()
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise UserError(
            f"train.fsdp: every process writes its part of a checkpoint into {folder}, which process "
            f"{join_names(blind, LISTED)} does not see. Put output.runs into a folder that all machines share, or use "
            "train.fsdp none"
        )
