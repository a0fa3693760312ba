"""Offload the inputs of checkpointed blocks to host memory after use, and fetch them one block ahead.

Exact: every input returns bit for bit. Shapes: b samples, t tokens, d width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletune.engine.memory.copy_stream import Copies, CopyEvent, copies_for, empty_on_host, finish_before_freed


@dataclass(eq=False)
class OffloadedInput:
    """An offloaded tensor."""

    host: Tensor  # its values, once the queue's copies up to here are done
    device: torch.device  # its original one
    before: WeakValueDictionary[int, OffloadedInput]  # of the previous block, which the backward pass needs next
    spent: bool = False  # whether it has been returned and its host memory reused


class CheckpointInputOffload:
    """Moves the tensors that a checkpoint saves to host memory, and fetches them in reverse order.

    Reuses host buffers. Besides the tensors in use, at most one block's inputs are in transit on the device. Tensors
    with fewer than three dimensions stay: the conditioning [b, d] is small and shared by all blocks.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None):
        self._device = device
        self._copies = copies_for(device) if copies is None else copies
        self._spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._leaving: list[tuple[Tensor, Tensor, CopyEvent]] = []
        self._arriving: dict[OffloadedInput, tuple[Tensor, CopyEvent]] = {}
        self._block: WeakValueDictionary[int, OffloadedInput] = WeakValueDictionary()
        self._before: WeakValueDictionary[int, OffloadedInput] = WeakValueDictionary()
        self.host_bytes = 0
        """Host memory allocated so far."""
        finish_before_freed(self, (self._copies,), (self._leaving, self._arriving))

    @contextmanager
    def offloading(self) -> Iterator[None]:
        """Offload the tensors that one block's checkpoint saves in this context."""
        self._let_go()
        if self._arriving:  # of a backward pass that failed
            self._copies.finish()
            self._arriving.clear()
        self._before, self._block = self._block, WeakValueDictionary()
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def _let_go(self) -> None:
        """Free the device memory of offloaded inputs; make the computation wait for the previous block's copies."""
        for _, _, sent in self._leaving:
            self._copies.wait(sent)
        self._leaving.clear()

    def pack(self, tensor: Tensor) -> Tensor | OffloadedInput:
        """Within ``offloading``, move a tensor to host memory; leave small tensors and those on other devices
        unchanged."""
        if tensor.dim() < 3 or tensor.device.type != self._device.type:
            return tensor
        source = tensor.detach()
        spare = self._spare[source.shape, source.dtype]
        if spare:
            host = spare.pop()  # the queue is ordered: it is read before it is overwritten
        else:
            host = empty_on_host(source, self._device)
            self.host_bytes += source.nbytes
        sent = self._copies.run(lambda: host.copy_(source, non_blocking=True), [self._copies.mark()])
        self._leaving.append((source, host, sent))  # its memory must not be reused during the copy
        offloaded = OffloadedInput(host, source.device, self._before)
        self._block[len(self._leaving)] = offloaded
        return offloaded

    def unpack(self, offloaded: Tensor | OffloadedInput) -> Tensor:
        """Return a tensor to the device, and start to fetch the previous block's; call once for each tensor."""
        if isinstance(offloaded, Tensor):
            return offloaded
        if offloaded.spent:
            raise RuntimeError(
                "cannot run a second backward pass: offloaded checkpoint inputs are freed after the first"
            )
        self._let_go()
        tensor, arrived = self._fetch(offloaded)
        self._copies.wait(arrived)
        del self._arriving[offloaded]
        offloaded.spent = True
        self._spare[offloaded.host.shape, offloaded.host.dtype].append(offloaded.host)
        for earlier in offloaded.before.values():
            self._fetch(earlier)
        return tensor

    def _fetch(self, offloaded: OffloadedInput) -> tuple[Tensor, CopyEvent]:
        """Return a tensor that is being copied back, starting the copy if necessary."""
        if offloaded not in self._arriving:
            # Allocated from the computation's pool, so the copy must wait for the previous user of this memory.
            tensor = torch.empty(offloaded.host.shape, dtype=offloaded.host.dtype, device=offloaded.device)
            after = [self._copies.mark()]
            host = offloaded.host
            arrived = self._copies.run(lambda: tensor.copy_(host, non_blocking=True), after)
            self._arriving[offloaded] = tensor, arrived
        return self._arriving[offloaded]
