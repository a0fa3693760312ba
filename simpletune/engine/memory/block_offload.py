"""Block offload: blocks' weights stay in host memory and are on the device only during their block's passes.

Two device buffers (slots) of the largest block's size are filled alternately, one block ahead, while the device
computes. Outside the passes every tensor points at host memory, so saving, exporting and loading work unchanged.

A slot is refilled only once the computation has finished with it. In the forward pass that is after the block. In the
backward pass, autograd functions have saved references to the weight tensors, not to the memory they pointed at. So a
block's weights are fetched again for its recomputation, and stay until the previous block's recomputation starts; by
then all of the block's gradients exist, because autograd processes later nodes first. Without checkpointing nothing
would fetch the weights again, and a weight still pointing at a slot would silently read another block's values
(bitsandbytes issue 2034).

Optimizer states of trained weights have two slots as well, each for one parameter's: the next one is fetched while one
is updated. The order of updates is that of the previous backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn

from simpletune.engine.memory import accounting
from simpletune.engine.memory.copy_stream import (
    Copies,
    CopyEvent,
    copies_for,
    empty_on_host,
    finish_before_freed,
    host_bytes,
)
from simpletune.engine.memory.machine_weights import is_shared, shared_runs
from simpletune.engine.memory.snapshot import FILE, round_to_block
from simpletune.engine.tensors import all_tensors, plain_tensors

SLOTS = 2
SMALL_STATE = 4096  # bytes; smaller optimizer state is not moved
POISON = 255  # a byte that makes NaN in every floating type


class HostBlock:
    """A block's tensors, moved into one flat host buffer. Tensors in pages shared by the machine's processes stay
    there.

    Args:
        tensors: the tensors; they keep their identity, and only their data pointers change.
        device: the device that computes with them.
        mapped: whether all of them stay where they are, in the pages of a file.
    """

    def __init__(self, tensors: list[Tensor], device: torch.device, mapped: bool = False):
        self.tensors = tensors
        self._pieces: list[tuple[int, Tensor]] = []
        """Pieces of host memory, each with its copy's offset in a buffer on the device."""
        self._offsets: list[int]
        shared = 0
        if mapped:
            starts = list(accumulate((round_to_block(tensor.nbytes) for tensor in tensors), initial=0))
            self.nbytes, self._offsets = starts.pop(), starts
            self.at_home: dict[int, Tensor] = {id(tensor): tensor.detach() for tensor in tensors}
            """The tensors' values in host memory, by the tensors' ids."""
            homes = (tensor.reshape(-1).view(torch.uint8) for tensor in self.at_home.values())
            self._pieces.extend(zip(starts, homes, strict=True))
            accounting.register(self.at_home.values(), FILE)
            return
        for run in shared_runs(tensors):
            self._pieces.append((shared, run))
            shared += run.numel()
        places = {piece.data_ptr(): start for start, piece in self._pieces}
        self._offsets = []
        self.nbytes = shared
        for tensor in tensors:
            if is_shared(tensor):
                first = max(address for address in places if address <= tensor.data_ptr())
                self._offsets.append(places[first] + tensor.data_ptr() - first)
            else:
                self._offsets.append(self.nbytes)
                self.nbytes += round_to_block(tensor.nbytes)
        own = host_bytes(self.nbytes - shared, device)
        self._pieces.append((shared, own))
        self.at_home = {}
        for start, tensor in zip(self._offsets, tensors, strict=True):
            if start < shared:
                self.at_home[id(tensor)] = tensor.detach()
            else:
                self.at_home[id(tensor)] = view_in(own, start - shared, tensor).copy_(tensor.detach())
        self.point_at_host()

    def copy_to(self, flat: Tensor) -> None:
        """Queue the copies of the block into a buffer: uint8 [n], n >= nbytes."""
        for start, piece in self._pieces:
            flat[start : start + piece.numel()].copy_(piece, non_blocking=True)

    def views(self, flat: Tensor) -> list[Tensor]:
        """View a buffer that ``copy_to`` has filled, on any device, as the block's tensors."""
        return [view_in(flat, start, tensor) for start, tensor in zip(self._offsets, self.tensors, strict=True)]

    def point_at(self, views: Iterable[Tensor]) -> None:
        """Point the tensors at these values."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def point_at_host(self) -> None:
        """Point the tensors at their values in host memory."""
        self.point_at(self.at_home.values())


def view_in(flat: Tensor, start: int, tensor: Tensor) -> Tensor:
    """View a part of a buffer as a tensor of the same type and shape as another one."""
    return flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Slot:
    """A device buffer for one block at a time."""

    def __init__(self, homes: Mapping[int, HostBlock], device: torch.device):
        size = max((home.nbytes for home in homes.values()), default=0)
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.views = {index: home.views(self.flat) for index, home in homes.items()}
        self.holds: int | None = None
        self.filled: CopyEvent = None


def _size_of(homes: Mapping[str, Tensor]) -> int:
    """Return the bytes of a parameter's optimizer state in a slot."""
    return sum(round_to_block(home.nbytes) for home in homes.values())


class StateSlot:
    """A device buffer for one parameter's optimizer state at a time."""

    def __init__(self, device: torch.device):
        self.flat = torch.empty(0, dtype=torch.uint8, device=device)
        self.views: dict[str, Tensor] = {}
        self.holds: int | None = None  # the parameter's id
        self.filled: CopyEvent = None
        self.written: CopyEvent = None  # its last state is back on the host


class BlockOffload:
    """Offloads blocks' weights. Run every block's passes, offloaded or resident, in the contexts ``forward`` and
    ``recomputation`` (see ``checkpointing.set_passes``).

    Args:
        blocks: all blocks, in the order of the forward pass; the offloaded ones move to host memory one by one.
        offloaded: the indices of the offloaded blocks.
        device: where the model runs.
        trained: whether to offload trained weights too, which must then be updated during the backward pass within
            ``updating``. Otherwise they stay on the device.
        queues: the queues of copies to the device and to the host; None creates them for the device.
        poison: fill a slot with NaN as soon as its block is done, to expose uses at the wrong time.
        mapped: the offloaded blocks' frozen weights lie in the pages of a file, and stay there.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        offloaded: Collection[int],
        device: torch.device,
        trained: bool = False,
        queues: tuple[Copies, Copies] | None = None,
        poison: bool = False,
        mapped: bool = False,
    ):
        self.device = device
        self._poison = poison
        self._in, self._out = queues or (copies_for(device), copies_for(device))

        # Blocks in host memory
        self.homes: dict[int, HostBlock] = {}
        counts = Counter(number for block in blocks for number in {id(tensor) for tensor in all_tensors(block)})
        shared = {number for number, count in counts.items() if count > 1}  # a hypernetwork's stay on the device
        for index in sorted(offloaded):
            own = {
                id(plain): plain
                for tensor in all_tensors(blocks[index])
                if trained or not tensor.requires_grad
                for plain in plain_tensors(tensor)
                if id(plain) not in shared
            }
            self.homes[index] = HostBlock(list(own.values()), device, mapped and not trained)
            for parameter in blocks[index].parameters():
                if id(parameter) in shared or (parameter.requires_grad and not trained):
                    parameter.data = parameter.data.to(device)  # the adapter's, created next to weights on the host
        self._streams = {id(tensor): index for index, home in self.homes.items() for tensor in home.tensors}

        # Slots on the device
        self._slots = [Slot(self.homes, device) for _ in range(SLOTS)]
        self._state_slots = [StateSlot(device) for _ in range(SLOTS)]
        finish_before_freed(self, (self._in, self._out), [*self._slots, *self._state_slots])
        accounting.register([slot.flat for slot in self._slots], "weights")

        # The present pass
        self._current: int | None = None
        self._in_use: Slot | None = None
        self._last = -1
        self._in_backward = False
        self._written: CopyEvent = None
        self._state_homes: dict[int, dict[str, Tensor]] = {}
        """Optimizer states in host memory, by the parameters' ids."""
        self._updated: list[int] = []  # those with such a state, in this backward pass
        self._updated_next: dict[int, int] = {}
        for slot in self._slots:
            self._give_up(slot)

    @contextmanager
    def forward(self, index: int) -> Iterator[None]:
        """Hold a block's weights on the device during its forward pass."""
        if self._in_backward or index <= self._last:
            self._finish()  # the previous pass had no backward pass, or one that failed
        self._last = index
        self._bring(index, [number for number in self.homes if number > index])
        try:
            yield
        finally:
            self._leave()
            if torch.is_autocast_enabled(self.device.type):
                torch.clear_autocast_cache()  # it would retain casts of every block's trained weights

    @contextmanager
    def recomputation(self, index: int) -> Iterator[None]:
        """Bring a block's weights to the device for its recomputation. They stay until another block's recomputation
        starts, or the backward pass ends."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._leave()
        self._bring(index, [number for number in reversed(self.homes) if number < index])
        yield

    @contextmanager
    def updating(self, parameter: nn.Parameter, state: dict[str, object]) -> Iterator[None]:
        """Hold an offloaded parameter and its optimizer state on the device for its update in the backward pass.

        Brings the state from host memory, unless it was fetched ahead, and fetches the next one's; copies new value and
        state to host memory while the computation continues. Does nothing for a parameter that is not offloaded.

        Args:
            parameter: the parameter, on the device in its block's slot; its gradient is ready.
            state: ``optimizer.state[parameter]``, changed in place; its tensors are in host memory outside the context.
        """
        index = self._streams.get(id(parameter))
        if index is None:
            yield
            return
        if index != self._current or not self._in_backward:
            raise RuntimeError(f"a weight of block {index} was updated outside that block's backward pass")
        number = id(parameter)
        homes = self._state_homes.get(number, {})
        moved = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.nbytes >= SMALL_STATE}
        at_home = moved and all(v is homes.get(n) for n, v in moved.items())
        slot = self._fetch_state(number) if at_home else None
        if slot is None:  # the state is new, or was loaded from a checkpoint
            state |= {n: v.to(self.device, non_blocking=True, copy=True) for n, v in moved.items()}
        else:
            self._in.wait(slot.filled)
            state |= slot.views
        if number in self._updated_next:
            self._fetch_state(self._updated_next[number], in_use=slot)
        yield
        copies = [(self.homes[index].at_home[number], parameter.detach())]
        for name, view in {} if slot is None else slot.views.items():
            if state.get(name) is view:
                state[name] = homes[name]
                copies.append((homes[name], view))
        self.keep_state(parameter, state)  # what the optimizer has created
        if self._state_homes[number]:
            self._updated.append(number)

        def write() -> None:
            for home, value in copies:
                home.copy_(value, non_blocking=True)

        self._written = self._out.run(write, [self._out.mark()])
        if slot is not None:
            slot.holds, slot.written = None, self._written

    @torch.no_grad()
    def keep_state(self, parameter: nn.Parameter, state: dict[str, object]) -> None:
        """Move an offloaded parameter's optimizer state, ``optimizer.state[parameter]``, to host memory, in place; does
        nothing for one that is not offloaded."""
        if id(parameter) not in self._streams:
            return
        homes = self._state_homes.setdefault(id(parameter), {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.nbytes >= SMALL_STATE and value is not homes.get(name):
                if name not in homes:
                    homes[name] = empty_on_host(value, self.device)
                state[name] = homes[name].copy_(value, non_blocking=True)

    def _fetch_state(self, number: int, in_use: StateSlot | None = None) -> StateSlot | None:
        """Return the slot with the optimizer state of a parameter, by its id; if there is none, queue its copies into a
        slot other than the one in use. None if there is no state in host memory yet."""
        homes = self._state_homes.get(number)
        if not homes:
            return None
        slots = [slot for slot in self._state_slots if slot is not in_use]
        slot = next((each for each in slots if each.holds == number), None)
        if slot is not None:
            return slot
        slot = next((each for each in slots if each.holds is None), slots[0])
        if _size_of(homes) > slot.flat.numel():
            for event in (slot.filled, slot.written):
                self._in.join(event)
            size = max(map(_size_of, self._state_homes.values()))
            slot.flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            accounting.register([slot.flat], "optimizer")
            slot.written = self._in.mark()  # its memory was another tensor's
        start, views = 0, {}
        for name, home in homes.items():
            views[name] = view_in(slot.flat, start, home)
            start += round_to_block(home.nbytes)

        def fill() -> None:
            for name, view in views.items():
                view.copy_(homes[name], non_blocking=True)

        slot.holds, slot.views, slot.filled = number, views, self._in.run(fill, [slot.written])
        return slot

    def _bring(self, index: int, ahead: list[int]) -> None:
        """Point a block's weights at the slot that contains them, and start to fill free slots for the offloaded blocks
        after it, ``ahead``."""
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
        """Point the current block's weights at host memory again, once all its work is queued."""
        if self._current is not None and self._in_use is not None:
            self.homes[self._current].point_at_host()
            if self._poison:
                self._give_up(self._in_use)
        self._current = self._in_use = None

    def _slot_of(self, index: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.holds == index), None)

    def _free_slots(self, keep: list[int]) -> list[Slot]:
        """Return the slots that contain neither the current block nor one of those to keep."""
        return [slot for slot in self._slots if slot is not self._in_use and slot.holds not in keep]

    def _fill(self, slot: Slot, index: int) -> Slot:
        """Queue the copy of a block into a slot, after the computation on the slot and pending writes to the host;
        return the slot."""
        home = self.homes[index]
        after = [self._in.mark(), self._written]
        slot.filled = self._in.run(lambda: home.copy_to(slot.flat), after)
        slot.holds = index
        return slot

    def _give_up(self, slot: Slot) -> None:
        """Mark a slot as free."""
        slot.holds = None
        if self._poison:
            slot.filled = self._in.run(lambda: slot.flat.fill_(POISON), [self._in.mark(), self._written])

    def _finish(self) -> None:
        """End the pass: point all weights at host memory, and wait until the updated ones have been copied there."""
        self._leave()
        self._in_backward, self._last = False, -1
        if self._updated:
            self._updated_next, self._updated = dict(zip(self._updated, self._updated[1:], strict=False)), []
        for state_slot in self._state_slots:
            state_slot.holds = None  # host memory may change before the next pass
        for slot in self._slots:
            self._give_up(slot)  # host weights may change before the next pass
        if self._written is not None:
            self._out.join(self._written)  # and for the optimizer's states, whose copies precede it or are part of it
