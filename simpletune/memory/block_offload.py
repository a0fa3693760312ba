"""Block streaming: weights of blocks live in host memory and are on the device only for their block's passes.

Two slots of the largest block's size are filled in turn, one block ahead of use, beside the computation. Outside of the
passes every tensor points at its host memory, so saving, exporting and loading need not know.

A slot is filled again only when the computation is done with it. In the forward pass that is after the block. In the
backward pass, autograd's functions have saved references to the weights themselves, not to what they pointed at: so a
block's weights are fetched again for its recomputation, and stay until the recomputation of the block before starts. By
then all of the block's gradients have been computed, for autograd runs what was made later first. Without checkpointing
nothing would fetch them; and weights left pointing at a slot would find another block's values there, silently
(bitsandbytes issue 2034).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simpletune.memory import accounting
from simpletune.memory.copy_stream import Copies, CopyEvent, copies_for, host_like
from simpletune.memory.host_block import HostBlock, own_plain_tensors

SLOTS = 2
SMALL_STATE = 4096  # bytes; optimizer state below it stays where it is
POISON = 255  # as a byte: NaN in every floating type


class Slot:
    """Device memory that holds one block at a time."""

    def __init__(self, nbytes: int, device: torch.device):
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.holds: int | None = None
        self.filled: CopyEvent = None
        self.views: dict[int, list[Tensor]] = {}


class BlockOffload:
    """Streams the weights of blocks. Every block's passes, streamed or resident, stand in ``forward`` and
    ``recomputation`` (see ``checkpointing.set_passes``).

    Args:
        blocks: in the order of the forward pass; the streamed ones move to host memory, one by one.
        streamed: numbers of the blocks that are streamed.
        device: where the model runs.
        trained: whether trained weights are streamed too; they must be updated during the backward pass, within
            ``updating``. If not, they stay on the device.
        queues: of copies to the device and to the host; None: of the device's own kind.
        poison: fill a slot with NaN as soon as its block is done: a use that comes too late or too early then shows.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        streamed: Collection[int],
        device: torch.device,
        trained: bool = False,
        queues: tuple[Copies, Copies] | None = None,
        poison: bool = False,
    ):
        self.device, self._poison = device, poison
        self._in, self._out = queues or (copies_for(device), copies_for(device))
        self.homes: dict[int, HostBlock] = {}
        for index in sorted(streamed):
            self.homes[index] = HostBlock(own_plain_tensors(blocks[index], trained), device)
            for parameter in blocks[index].parameters():
                if parameter.requires_grad and not trained:
                    parameter.data = parameter.data.to(device)  # a LoRA's, made beside weights on the host
        size = max((home.nbytes for home in self.homes.values()), default=0)
        self._slots = [Slot(size, device) for _ in range(SLOTS)]
        accounting.register([slot.flat for slot in self._slots], "weights")
        self._streams = {id(tensor): index for index, home in self.homes.items() for tensor in home.tensors}
        self._current: int | None = None
        self._in_use: Slot | None = None
        self._last = -1
        self._in_backward = False
        self._written: CopyEvent = None
        self._state_homes: dict[tuple[int, str], Tensor] = {}
        for slot in self._slots:
            self._give_up(slot)

    @property
    def host_bytes(self) -> int:
        """Host memory of all streamed blocks."""
        return sum(home.nbytes for home in self.homes.values())

    @contextmanager
    def forward(self, index: int) -> Iterator[None]:
        """A block's forward pass: its weights are on the device."""
        if self._in_backward or index <= self._last:
            self._finish()  # of a pass without a backward pass, or with one that ended in an error
        self._last = index
        self._bring(index, [number for number in self.homes if number > index])
        try:
            yield
        finally:
            self._leave()
            if torch.is_autocast_enabled(self.device.type):
                torch.clear_autocast_cache()  # it would keep casts of trained weights, of every block

    @contextmanager
    def recomputation(self, index: int) -> Iterator[None]:
        """A block's forward pass within its backward pass: its weights stay until another block's start this, or until
        the backward pass ends."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._leave()
        self._bring(index, [number for number in reversed(self.homes) if number < index])
        yield

    @contextmanager
    def updating(self, parameter: nn.Parameter, state: dict[str, object]) -> Iterator[None]:
        """Around the update of one parameter in the backward pass, when its gradient is ready.

        Its optimizer state is brought from host memory, and goes back; its new value goes home while the computation
        goes on. A parameter that is not streamed is left alone, and so is its state.

        Args:
            parameter: on the device, in its block's slot.
            state: ``optimizer.state[parameter]``, changed in place; outside of this context its tensors are the host's.
        """
        index = self._streams.get(id(parameter))
        if index is None:
            yield
            return
        if index != self._current or not self._in_backward:
            raise RuntimeError(f"a weight of block {index} is updated outside of that block's backward pass")
        for name, value in state.items():
            if isinstance(value, Tensor) and value.nbytes >= SMALL_STATE:
                state[name] = value.to(self.device, non_blocking=True, copy=True)
        yield
        with torch.no_grad():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.nbytes >= SMALL_STATE:
                    state[name] = self._state_home(parameter, name, value).copy_(value, non_blocking=True)
        home, value = self.homes[index].value_of(parameter), parameter.detach()
        self._written = self._out.run(lambda: home.copy_(value, non_blocking=True), [self._out.mark()])

    def _state_home(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        key = (id(parameter), name)
        if key not in self._state_homes:
            self._state_homes[key] = host_like(value, self.device)
        return self._state_homes[key]

    def _bring(self, index: int, ahead: list[int]) -> None:
        """Let a block's weights point at a slot that holds them, and start to fill the free slots for what is next.

        Args:
            ahead: the streamed blocks that come after this one, in order.
        """
        if index in self.homes:
            slot = self._slot_of(index) or self._fill(self._free_slots([])[0], index)
            self._in.wait(slot.filled)
            self._current, self._in_use = index, slot
            self.homes[index].point_at(slot.views[index])
        wanted = ahead[: SLOTS - (self._in_use is not None)]
        free = self._free_slots(wanted)
        for number, slot in zip([n for n in wanted if self._slot_of(n) is None], free, strict=False):
            self._fill(slot, number)

    def _leave(self) -> None:
        """The computation has been given all work with the current block: its weights point home."""
        if self._current is not None and self._in_use is not None:
            self.homes[self._current].point_at_host()
            if self._poison:
                self._give_up(self._in_use)
        self._current = self._in_use = None

    def _slot_of(self, index: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.holds == index), None)

    def _free_slots(self, keep: list[int]) -> list[Slot]:
        """The slots that hold neither the current block nor one of those to keep."""
        return [slot for slot in self._slots if slot is not self._in_use and slot.holds not in keep]

    def _fill(self, slot: Slot, index: int) -> Slot:
        """Start to copy a block into a slot, once the computation is done with the slot and the block is whole at home.

        Returns:
            The slot.
        """
        home = self.homes[index]
        if index not in slot.views:
            slot.views[index] = home.views(slot.flat)
        after = [self._in.mark(), self._written]
        slot.filled = self._in.run(lambda: slot.flat[: home.nbytes].copy_(home.flat, non_blocking=True), after)
        slot.holds = index
        return slot

    def _give_up(self, slot: Slot) -> None:
        """Forget what a slot holds."""
        slot.holds = None
        if self._poison:
            slot.filled = self._in.run(lambda: slot.flat.fill_(POISON), [self._in.mark(), self._written])

    def _finish(self) -> None:
        """Forward and backward pass are over: everything is at home, and what was updated has arrived there."""
        self._leave()
        self._in_backward, self._last = False, -1
        for slot in self._slots:
            self._give_up(slot)  # weights may be changed at home before the next pass
        if self._written is not None:
            self._out.join(self._written)
            self._out.join(self._out.mark())  # optimizer state goes with the computation
