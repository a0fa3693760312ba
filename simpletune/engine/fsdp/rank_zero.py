"""Let one process evaluate, draw, save and export with a sharded model, while the others follow its instructions.

Between two steps only the first process works, but its forward passes need every process's weights. So it leads: before
each unit's pass it tells the others to gather that unit's weights with it. Nothing is computed twice, and an error in
the first process stays there, because the others just wait for the next instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, distributed, nn

from simpletune.engine.fsdp.fsdp_model import FsdpModel, ParameterPart
from simpletune.engine.optim.ema import Average

KEY = "_simpletune_leading"


class Command(IntEnum):
    """An instruction from the first process to the others, sent with a number."""

    END = 0
    """Continue training."""
    GATHER_UNIT = 1
    """Gather the weights of the unit with this number."""
    GATHER = 2
    """Gather the parameter with this number."""
    SWAP_IN = 3
    """Swap the average in for the weights."""
    SWAP_OUT = 4
    """Swap the weights back in."""
    SAVE = 5
    """Write this process's parts of the checkpoint after this number of steps."""


class RankZeroDriver:
    """Lets the first process lead the others.

    Args:
        fsdp: the model, divided.
    """

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
        shards, swapped = list(self.fsdp.shards.values()), ExitStack()

        def swap(enters: bool) -> None:
            self.fsdp.reshard()
            if enters and average is not None:
                swapped.enter_context(average.in_place())
            else:
                swapped.close()

        tasks: dict[int, Callable[[int], object]] = {
            Command.GATHER_UNIT: self._gather_unit,
            Command.GATHER: lambda number: gather_parameter(shards[number], self.fsdp.group),
            Command.SWAP_IN: lambda _: swap(enters=True),
            Command.SWAP_OUT: lambda _: swap(enters=False),
            Command.SAVE: save,
        }
        with swapped:
            while (heard := self._hear())[0] != Command.END:
                tasks[heard[0]](heard[1])
        self.fsdp.reshard()

    def tell(self, word: Command, number: int = 0) -> None:
        """Tell the others what to do."""
        distributed.broadcast(torch.tensor([word, number], device=self.fsdp.device), 0)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather one parameter after the other, in the first process while it leads; yield names and whole tensors."""
        assert self._leads
        for number, (name, shard) in enumerate(self.fsdp.shards.items()):
            self.tell(Command.GATHER, number)
            yield name, gather_parameter(shard, self.fsdp.group)

    def averaging(self, average: Average) -> Average:
        """An average that is swapped in and out in all processes when the first process does so."""
        return GatheredAverage(average, self)

    @contextmanager
    def swapped(self, swap: AbstractContextManager[None]) -> Iterator[None]:
        """Swap the average in, in all processes, within this context."""
        if not self._leads:
            with swap:
                yield
            return
        self.fsdp.reshard()
        self.tell(Command.SWAP_IN)
        try:
            with swap:
                yield
        finally:
            self.fsdp.reshard()
            self.tell(Command.SWAP_OUT)

    def _hear(self) -> tuple[int, int]:
        told = torch.zeros(2, dtype=torch.int64, device=self.fsdp.device)
        distributed.broadcast(told, 0)
        word, number = told.tolist()
        return word, number

    def _before_pass(self, number: int, unit: nn.Module, inputs: tuple[object, ...]) -> None:
        """Tell the others to gather the weights that the unit's own hook gathers next."""
        if self._leads:
            self.tell(Command.GATHER_UNIT, number)

    def _gather_unit(self, number: int) -> None:
        """Take part in gathering a unit's weights; weights outside of blocks stay gathered, as in the first process."""
        unit = self.fsdp.units[number]
        unit.unshard()  # type: ignore[operator]
        if unit is not self.fsdp.units[-1]:
            unit.reshard()  # type: ignore[operator]


class GatheredAverage:
    """An average of a sharded model's weights.

    Args:
        average: the average of this process's parts.
        leading: tells the other processes.
    """

    def __init__(self, average: Average, leading: RankZeroDriver):
        self._average, self._leading = average, leading

    def update(self, undone: Tensor | None = None) -> None:
        """Update the averages of this process's parts."""
        self._average.update(undone)

    def in_place(self) -> AbstractContextManager[None]:
        """Swap the average into the weights within this context."""
        return self._leading.swapped(self._average.in_place())

    def tensors(self) -> dict[str, Tensor]:
        """Return the fp32 averages of this process's parts by name."""
        return self._average.tensors()

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Restore what ``tensors`` returned after ``step`` steps."""
        self._average.load(tensors, step)


def gather_parameter(shard: ParameterPart, group: distributed.ProcessGroup) -> Tensor:
    """Gather a parameter; all processes take part.

    Avoids ``DTensor.full_tensor``: after a simulation with another process group, it did not wait for the other
    processes (seen with torch 2.13.0).
    """
    most, held = shard.starts[1], shard.held.detach().reshape(-1)  # only the last parts may have fewer
    sent = torch.zeros(most, dtype=held.dtype, device=held.device)
    sent[: held.numel()] = held
    parts = sent.new_empty(most * group.size())
    distributed.all_gather_into_tensor(parts, sent, group=group)
    return parts[: shard.starts[-1]].view(shard.shape)


def rank_zero_driver(model: nn.Module) -> RankZeroDriver | None:
    """A model's ``RankZeroDriver``; None if the model is not sharded."""
    found: RankZeroDriver | None = model.__dict__.get(KEY)
    return found
