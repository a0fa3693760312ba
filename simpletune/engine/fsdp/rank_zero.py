"""Let one process evaluate, generate, save and export with a sharded model, while the others follow its instructions.

Between two steps only the first process works, but its forward passes need every process's weights. So it leads: before
each unit's pass it tells the others to gather that unit's weights with it. If every process ran the same code instead,
each would load the autoencoder and compute the same images, and a failure in one would leave the others in a
collective, or pair it with one of training; here an error in the first process stays there, because the others just
wait for the next instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import IntEnum, auto
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from simpletune.engine.fsdp.fsdp_model import FsdpModel, ParameterPart
from simpletune.engine.optim.ema import Average
from simpletune.system.atomic import atomic_folder
from simpletune.system.model_folder import NAMES
from simpletune.system.safetensors_file import TYPES, SafetensorsWriter

KEY = "_simpletune_leading"


class Command(IntEnum):
    """An instruction from the first process to the others, sent with a number: of the unit or parameter to gather, or
    of the steps after which to save. ``END``: continue training."""

    END = auto()
    GATHER_UNIT = auto()
    GATHER = auto()
    SWAP_IN = auto()
    SWAP_OUT = auto()
    SAVE = auto()


class RankZeroDriver:
    """The first process's lead over the others."""

    def __init__(self, fsdp: FsdpModel):
        self.fsdp, self._leads = fsdp, False
        fsdp.units[-1].__dict__[KEY] = self
        for number, unit in enumerate(fsdp.units):
            unit.register_forward_pre_hook(partial(self._before_pass, number), prepend=True)

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Work alone within this context, in the first process; the others follow."""
        self._leads = True
        try:
            yield
        finally:
            self.fsdp.reshard()
            self.tell(Command.END)
            self._leads = False

    def follow(self, average: Average | None, save: Callable[[int], None]) -> None:
        """Follow the first process's instructions until it has finished.

        Args:
            average: the average of this process's parts of the weights.
            save: writes this process's parts of the checkpoint after a number of steps.
        """
        told = torch.empty(2, dtype=torch.int64, device=self.fsdp.device)
        shards = list(self.fsdp.shards.values())
        with ExitStack() as swapped:
            while True:
                distributed.broadcast(told, 0)
                command, number = told.tolist()
                match command:
                    case Command.END:
                        break
                    case Command.GATHER_UNIT:
                        unit = self.fsdp.units[number]
                        unit.unshard()
                        if number < len(self.fsdp.units) - 1:  # the others stay gathered, as in the first process
                            unit.reshard()
                    case Command.GATHER:
                        gather_parameter(shards[number], self.fsdp.group)
                    case Command.SWAP_IN:
                        assert average is not None
                        self.fsdp.reshard()
                        swapped.enter_context(average.swap_in())
                    case Command.SWAP_OUT:
                        self.fsdp.reshard()
                        swapped.close()
                    case Command.SAVE:
                        save(number)
        self.fsdp.reshard()

    def tell(self, command: Command, number: int = 0) -> None:
        """Tell the others what to do."""
        distributed.broadcast(torch.tensor([command, number], device=self.fsdp.device), 0)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather one parameter after the other, in the first process while it leads; yield names and whole tensors."""
        assert self._leads
        for number, (name, shard) in enumerate(self.fsdp.shards.items()):
            self.tell(Command.GATHER, number)
            yield name, gather_parameter(shard, self.fsdp.group)

    @contextmanager
    def swap(self, average: Average) -> Iterator[None]:
        """Swap an average of this process's parts in within this context; in all processes, while this one leads."""
        if not self._leads:
            with average.swap_in():
                yield
            return
        self.fsdp.reshard()
        self.tell(Command.SWAP_IN)
        try:
            with average.swap_in():
                yield
        finally:
            self.fsdp.reshard()
            self.tell(Command.SWAP_OUT)

    def _before_pass(self, number: int, unit: nn.Module, inputs: tuple[object, ...]) -> None:
        """Tell the others to gather the weights that the unit's own hook gathers next."""
        if self._leads:
            self.tell(Command.GATHER_UNIT, number)


class GatheredAverage:
    """An average of a sharded model's weights: swapped in and out in all processes when the first one does so."""

    def __init__(self, average: Average, leading: RankZeroDriver):
        self.update = average.update
        self.tensors = average.tensors
        self.load = average.load
        self.swap_in = partial(leading.swap, average)


def gather_parameter(shard: ParameterPart, group: distributed.ProcessGroup) -> Tensor:
    """Gather a parameter; all processes take part.

    Avoids ``DTensor.full_tensor`` and torch's ``get_model_state_dict``: after a simulation with another process group,
    the first did not wait for the other processes, and the second hung (seen with torch 2.13.0).
    """
    most, held = shard.starts[1], shard.held.detach().reshape(-1)  # only the last parts may have fewer
    sent = torch.zeros(most, dtype=held.dtype, device=held.device)
    sent[: held.numel()] = held
    parts = sent.new_empty(most * group.size())
    distributed.all_gather_into_tensor(parts, sent, group=group)
    return parts[: shard.starts[-1]].view(shard.whole.shape)


def rank_zero_driver(model: nn.Module) -> RankZeroDriver | None:
    """Return a model's ``RankZeroDriver``; None if the model is not sharded."""
    found: RankZeroDriver | None = model.__dict__.get(KEY)
    return found


def write_divided_folder(
    model: nn.Module, leading: RankZeroDriver, folder: Path, metadata: dict[str, str], instead: Mapping[str, Tensor]
) -> Path:
    """Write a sharded diffusers model as ``write_model_folder`` does, in the first process while it leads, within
    ``restore_class``; ``instead`` replaces the model's own tensors of the same names.

    Parameter by parameter, so that no process ever holds all of it. torch's ``get_model_state_dict`` gathers the same
    file in the first process's memory: for a model of 864 MiB in two processes it took 901 MiB more, this 127 MiB
    (torch 2.13.0, gloo).
    """
    state: dict[str, Tensor] = {**model.state_dict(), **instead}
    names = {f"torch.{about.torch}": name for name, about in TYPES.items()}
    entries = {name: (names[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in state.items()}
    with atomic_folder(folder) as part:
        model.save_config(part)  # type: ignore[operator]
        with SafetensorsWriter(part / f"{NAMES[0]}.safetensors", entries, {"format": "pt", **metadata}) as writer:
            for name, tensor in state.items():
                if name not in leading.fsdp.shards:
                    writer.write(name, tensor)
            for name, tensor in leading.whole_tensors():
                writer.write(name, tensor)
    return folder


@contextmanager
def restore_class(model: nn.Module) -> Iterator[None]:
    """Restore a sharded model's own class within this context; torch replaces it by one with another name."""
    divided = type(model)
    own = next((kind for kind in divided.__mro__ if kind.__module__.partition(".")[0] != "torch"), divided)
    model.__class__ = own
    try:
        yield
    finally:
        model.__class__ = divided
