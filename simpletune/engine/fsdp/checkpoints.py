"""Save a sharded model's checkpoint in all processes, and restore any checkpoint into a model, sharded or not.

Each process writes its parts of parameters, averages and optimizer state as a safetensors file of each kind.
``KIND.shards.json`` lists the files with their checksums, and for each parameter its shape and the first element of
each file's part. A file stores its rows of each parameter under the parameter's name; a file of optimizer state uses
``PARAMETER/STATE`` and stores other values in its header. Any number of processes can read them.

Not with ``torch.distributed.checkpoint``: it divides only ``DTensor``s anew, but 8-bit state has a scale for each block
of elements, and it computes no checksums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed, nn

from simpletune.engine.fsdp.fsdp_model import FsdpModel, fsdp_model, local_parameters
from simpletune.engine.optim.ema import Average
from simpletune.engine.optim.options import OptimizerOption
from simpletune.engine.optim.place import ParameterRange, StatePiece, join_state
from simpletune.engine.optim.state import STATE_KEY, State, state_to_tensors
from simpletune.engine.tensors import trained_parameters
from simpletune.system.atomic import write_json
from simpletune.system.checksums import sha256_of
from simpletune.system.options import Json, UserError, join_names
from simpletune.system.safetensors_file import (
    INDEX_SUFFIX,
    WeightReader,
    files_of_index,
    read_header,
    write_safetensors,
)

LISTED = 4
WEIGHTS, STATES, AVERAGES = "trainable", "optimizer", "ema"
VALUES = "simpletune_values"  # header entry for plain values of optimizer state


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
        written = _write_own(folder, fsdp, optimizer, average, metadata)
    except (OSError, UserError) as error:
        written = {"error": str(error), "code": error.code if isinstance(error, UserError) else 1}
    every: list[Json] = gather_object([written])
    if fsdp.rank:
        return
    require_written(every, folder)
    parameters = {
        name: {"shape": list(shard.whole.shape), "starts": list(shard.starts[:-1])}
        for name, shard in fsdp.shards.items()
    }
    for kind in every[0]:
        index = {"processes": len(every), "files": [each[kind] for each in every], "parameters": parameters}
        write_json(folder / f"{kind}{INDEX_SUFFIX}", index)


def _write_own(
    folder: Path,
    fsdp: FsdpModel,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    metadata: dict[str, str],
) -> Json:
    """Write this process's files; return their names and checksums by kind, or only the names of parameters with NaN or
    infinity, as ``bad``."""
    held = fsdp.held
    peaks = [torch.linalg.vector_norm(part.detach(), torch.inf).float() for part in held.values()]
    finite = torch.stack(peaks).isfinite().tolist() if peaks else []
    if bad := [name for name, fine in zip(held, finite, strict=True) if not fine]:
        return {"bad": bad}

    def write(kind: str, tensors: Mapping[str, Tensor], header: dict[str, str]) -> Json:
        name = f"{kind}-{fsdp.rank:05d}-of-{fsdp.processes:05d}.safetensors"
        file = write_safetensors(tensors, folder / name, header)
        return {"file": file.name, "sha256": sha256_of(file)}

    names = list(held)
    written: Json = {WEIGHTS: write(WEIGHTS, held, metadata)}
    tensors, scalars = state_to_tensors(optimizer)
    states = {_state_name(key, names): tensor for key, tensor in tensors.items()}
    written[STATES] = write(STATES, states, {VALUES: json.dumps(_by_state_name(scalars, names))})
    if average is not None:
        written[AVERAGES] = write(AVERAGES, average.tensors(), {})
    return written


def _state_name(key: str, names: Sequence[str]) -> str:
    """Name a state for a file: ``12.exp_avg`` -> ``blocks.0.weight/exp_avg``; ``names`` are the parameters', in the
    optimizer's order."""
    match = STATE_KEY.match(key)
    assert match is not None, key
    return f"{names[int(match[1])]}/{match[2]}"


def _by_state_name(scalars: Json, names: Sequence[str]) -> Json:
    """Return what ``state_to_tensors`` returned beside tensors, by ``PARAMETER/STATE``."""
    return {
        "values": {_state_name(key, names): value for key, value in scalars["values"].items()},
        "shared": {_state_name(key, names): _state_name(source, names) for key, source in scalars["shared"].items()},
    }


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
    """An error that names parameters that are not finite, in any process."""

    def __init__(self, names: list[str]):
        super().__init__(f"{len(names)} trained parameters are non-finite ({join_names(names, LISTED)})")
        self.names = names


def restore_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, option: OptimizerOption, files: tuple[Path, Path], scalars: Json
) -> None:
    """Restore weights and optimizer state that any number of processes has written, into a model, sharded or not.

    Args:
        files: those of the weights and of the state: the index, or the one file.
        scalars: other values of the state, for a checkpoint in one file.
    """
    held, whole = local_parameters(model), trained_parameters(model)
    with torch.no_grad():
        for name, rows in load_rows(model, WeightReader([files[0]])):
            held[name].copy_(rows)
    sizes = {name: parameter.numel() for name, parameter in whole.items()}
    restore_states(option, optimizer, parameter_ranges(model), SavedStates(files[1], sizes, scalars))


def load_rows(model: nn.Module, reader: WeightReader) -> Iterator[tuple[str, Tensor]]:
    """Load this process's rows of each trained parameter, one after the other."""
    fsdp = fsdp_model(model)
    for name, parameter in local_parameters(model).items():
        if fsdp is None:
            yield name, reader.get(name)
        else:
            first = fsdp.shards[name].place.start // (parameter.numel() // len(parameter))
            yield name, reader.rows(name, first, first + len(parameter))


def parameter_ranges(model: nn.Module) -> dict[str, ParameterRange]:
    """Return the places, in the whole parameters, of the parts that this process updates, by name."""
    fsdp = fsdp_model(model)
    if fsdp is not None:
        return dict(zip(fsdp.held, fsdp.places, strict=True))
    parameters = trained_parameters(model).items()
    return {name: ParameterRange(number, 0, parameter.numel()) for number, (name, parameter) in enumerate(parameters)}


class SavedStates:
    """A checkpoint's optimizer state, written by any number of processes; loads one parameter's at a time.

    Args:
        file: the index, or the one file.
        sizes: numbers of elements of the trained parameters, in the order of the model.
        scalars: other values, for a checkpoint in one file.
    """

    def __init__(self, file: Path, sizes: Mapping[str, int], scalars: Json):
        names = list(sizes)
        if not file.name.endswith(INDEX_SUFFIX):
            reader = WeightReader([file])
            named = {_state_name(key, names): key for key in reader.names}
            self._parts = {name: [(0, size)] for name, size in sizes.items()}
            self._files = [_StateFile(reader, named, _by_state_name(scalars, names))]
            return
        found: Json = json.loads(file.read_text(encoding="utf-8"))
        self._parts = {
            name: list(pairwise([*about["starts"], math.prod(about["shape"])]))
            for name, about in found["parameters"].items()
        }
        self._files = []
        for part in files_of_index(file):
            reader = WeightReader([part])
            about = json.loads(read_header(part)["__metadata__"][VALUES])
            self._files.append(_StateFile(reader, {name: name for name in reader.names}, about))

    def pieces(self, name: str, start: int, stop: int) -> list[StatePiece]:
        """Return the pieces that overlap a parameter's elements ``start`` to ``stop``; empty if it has no state yet."""
        return [
            StatePiece(begin, end, values)
            for (begin, end), file in zip(self._parts[name], self._files, strict=True)
            if max(start, begin) < min(stop, end) and (values := file.of(name))
        ]


class _StateFile:
    """One process's part of the state: the tensors' names in the file, plain values and shared tables, all by
    ``PARAMETER/STATE``."""

    def __init__(self, reader: WeightReader, named: Mapping[str, str], about: Json):
        self._reader = reader
        self._named = named
        self._about = about
        self._keys: dict[str, list[str]] = {}
        for key in (*named, *about["values"], *about["shared"]):
            self._keys.setdefault(key.rpartition("/")[0], []).append(key)

    def of(self, name: str) -> State:
        """Load the state of one parameter's part."""
        values, shared = self._about["values"], self._about["shared"]
        state: State = {}
        for key in self._keys.get(name, []):
            found = values[key] if key in values else self._reader.get(self._named[shared.get(key, key)])
            state[key.rpartition("/")[2]] = found
        return state


def restore_states(
    option: OptimizerOption, optimizer: torch.optim.Optimizer, places: Mapping[str, ParameterRange], saved: SavedStates
) -> None:
    """Replace the state of each of the optimizer's parameters; ``places`` are theirs, in their order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tables: dict[bytes, Tensor] = {}
    for (name, place), parameter in zip(places.items(), parameters, strict=True):
        stop = place.start + parameter.numel()
        pieces = saved.pieces(name, place.start, stop)
        state = join_state(pieces, place.start, stop) if pieces else {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                optimizer.state[parameter][key] = value
            elif key.startswith("qmap"):  # one table for all
                table = tables.setdefault(value.numpy().tobytes(), value.to(parameter.device))
                optimizer.state[parameter][key] = table
            else:
                shaped = value.view(parameter.shape) if value.dim() and value.numel() == parameter.numel() else value
                optimizer.state[parameter][key] = option.place(parameter, key, shaped)


def require_shared(folder: Path, fsdp: FsdpModel) -> None:
    """Check that all processes see the run's folder, which exists in the first; each writes its part of a checkpoint
    into it."""
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
