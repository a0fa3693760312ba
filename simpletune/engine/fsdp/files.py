"""Write and read the parts of a checkpoint that each process holds: safetensors files, and an index of them.

``KIND.shards.json`` lists the files with their checksums, and for each parameter its shape and the first element of
each file's part. A file stores its rows of each parameter under the parameter's name; a file of optimizer state uses
``PARAMETER/STATE`` and stores other values in its header. Any number of processes can read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from simpletune.engine.fsdp.fsdp_model import ParameterPart, process_ranges
from simpletune.engine.optim.optimizer import STATE_KEY, OptimizerOption, state_to_tensors
from simpletune.engine.optim.place import ParameterRange, StatePiece, joined_state
from simpletune.engine.optim.state import State
from simpletune.system.atomic import write_json
from simpletune.system.checksums import sha256_of
from simpletune.system.options import Json
from simpletune.system.safetensors_file import (
    INDEX_SUFFIX,
    WeightReader,
    files_of_index,
    read_header,
    write_safetensors,
)

VALUES = "simpletune_values"  # header entry for plain values of optimizer state


def part_file(kind: str, rank: int, processes: int) -> str:
    """The name of the file with one process's parts."""
    return f"{kind}-{rank:05d}-of-{processes:05d}.safetensors"


def write_parts(
    folder: Path, kind: str, tensors: Mapping[str, Tensor], metadata: dict[str, str], of: tuple[int, int]
) -> dict[str, str]:
    """Write one process's parts; return the file's name and its SHA-256.

    Args:
        kind: what they contain: ``trainable``, ``optimizer`` or ``ema``.
        of: the process's rank, and the number of processes.
    """
    file = write_safetensors(tensors, folder / part_file(kind, *of), metadata)
    return {"file": file.name, "sha256": sha256_of(file)}


def write_index(folder: Path, kind: str, files: Sequence[Json], shards: Mapping[str, ParameterPart]) -> Path:
    """Write the index of ``files``, which ``write_parts`` returned in the order of the processes."""
    parameters = {
        name: {"shape": list(shard.shape), "starts": list(shard.starts[:-1])} for name, shard in shards.items()
    }
    index = folder / f"{kind}{INDEX_SUFFIX}"
    write_json(index, {"processes": len(files), "files": list(files), "parameters": parameters})
    return index


def state_by_name(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """An optimizer's state by ``PARAMETER/STATE``, and its other values as a string for the header; ``names`` are those
    of its parameters, in their order."""
    tensors, scalars = state_to_tensors(optimizer)
    renamed = {_renamed(key, names): tensor for key, tensor in tensors.items()}
    values = {_renamed(key, names): value for key, value in scalars["values"].items()}
    shared = {_renamed(key, names): _renamed(source, names) for key, source in scalars["shared"].items()}
    return renamed, {VALUES: json.dumps({"values": values, "shared": shared})}


def _renamed(key: str, names: Sequence[str]) -> str:
    """``12.exp_avg`` -> ``blocks.0.weight/exp_avg``."""
    match = STATE_KEY.match(key)
    assert match is not None, key
    return f"{names[int(match[1])]}/{match[2]}"


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
            named = {_renamed(key, names): key for key in reader.names}
            about = {
                "values": {_renamed(key, names): value for key, value in scalars["values"].items()},
                "shared": {_renamed(key, names): _renamed(of, names) for key, of in scalars["shared"].items()},
            }
            self._parts = {name: [(0, size)] for name, size in sizes.items()}
            self._files = [_StateFile(reader, named, about)]
            return
        found: Json = json.loads(file.read_text())
        self._parts = {
            name: process_ranges([*about["starts"], math.prod(about["shape"])])
            for name, about in found["parameters"].items()
        }
        self._files = [_StateFile.opened(part) for part in files_of_index(file)]

    def pieces(self, name: str, start: int, stop: int) -> list[StatePiece]:
        """The pieces that overlap a parameter's elements ``start`` to ``stop``; empty if it has no state yet."""
        return [
            StatePiece(begin, end, values)
            for (begin, end), file in zip(self._parts[name], self._files, strict=True)
            if max(start, begin) < min(stop, end) and (values := file.of(name))
        ]


class _StateFile:
    """One process's part of the state: the tensors' names in the file, plain values and shared tables, all by
    ``PARAMETER/STATE``."""

    def __init__(self, reader: WeightReader, named: Mapping[str, str], about: Json):
        self._reader, self._named, self._about = reader, named, about
        self._keys: dict[str, list[str]] = {}
        for key in (*named, *about["values"], *about["shared"]):
            self._keys.setdefault(key.rpartition("/")[0], []).append(key)

    @classmethod
    def opened(cls, file: Path) -> _StateFile:
        """Open a file that names its state by parameter."""
        reader = WeightReader([file])
        return cls(reader, {name: name for name in reader.names}, json.loads(read_header(file)["__metadata__"][VALUES]))

    def of(self, name: str) -> State:
        """Load the state of one parameter's part."""
        return {key.rpartition("/")[2]: self._value(key) for key in self._keys.get(name, [])}

    def _value(self, key: str) -> Tensor | int | float:
        values, shared = self._about["values"], self._about["shared"]
        if key in values:
            number: int | float = values[key]
            return number
        return self._reader.get(self._named[shared.get(key, key)])


def restore_states(
    option: OptimizerOption, optimizer: torch.optim.Optimizer, places: Mapping[str, ParameterRange], saved: SavedStates
) -> None:
    """Replace the state of each of the optimizer's parameters; ``places`` are theirs, in their order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tables: dict[bytes, Tensor] = {}
    for (name, place), parameter in zip(places.items(), parameters, strict=True):
        stop = place.start + parameter.numel()
        pieces = saved.pieces(name, place.start, stop)
        state = joined_state(pieces, place.start, stop) if pieces else {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                optimizer.state[parameter][key] = value
            elif key.startswith("qmap"):  # one table for all
                table = tables.setdefault(value.numpy().tobytes(), value.to(parameter.device))
                optimizer.state[parameter][key] = table
            else:
                shaped = value.view(parameter.shape) if value.dim() and value.numel() == parameter.numel() else value
                optimizer.state[parameter][key] = option.place(parameter, key, shaped)
