"""What checkpointing keeps of each block, its inputs, in host memory: sent out after use, fetched one block ahead.

Exact: the bits that come back are those that went. Shapes: b samples, t tokens, d width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletune.memory.copy_stream import Copies, CopyEvent, copies_for, host_like


@dataclass(eq=False)
class OffloadedInput:
    """A tensor that is away.

    Args:
        host: its values, once ``sent`` is done.
        sent: the copy to the host.
        device: where it came from.
        before: what is away of the block before: it is needed next.
        back: its copy on the device and the event of that, once it is on its way.
        spent: it has been given back, and its host memory serves another.
    """

    host: Tensor
    sent: CopyEvent
    device: torch.device
    before: WeakSet[OffloadedInput]
    back: tuple[Tensor, CopyEvent] | None = None
    spent: bool = False


class CheckpointInputOffload:
    """Sends the tensors that a checkpoint keeps to host memory, and fetches them in the opposite order.

    Host buffers are used again and again. The device holds, beside what is computed with, the inputs of one block on
    their way out, or of one on its way in. Tensors of under three dimensions stay: the conditioning [b, d] is small,
    and all blocks share it.

    Args:
        device: where the model runs.
        copies: the queue beside the computation.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None):
        self._device = device
        self._copies = copies_for(device) if copies is None else copies
        self._spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._leaving: list[tuple[Tensor, Tensor, CopyEvent]] = []
        self._block: WeakSet[OffloadedInput] = WeakSet()
        self._before: WeakSet[OffloadedInput] = WeakSet()
        self.host_bytes = 0
        """Host memory taken so far."""

    @contextmanager
    def offloading(self) -> Iterator[None]:
        """What one block's checkpoint saves for the backward pass within this context goes to the host."""
        self._let_go()
        self._before, self._block = self._block, WeakSet()
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _let_go(self) -> None:
        """Free what has left: the computation waits for the copies of the block before, which are done by now."""
        for _, _, sent in self._leaving:
            self._copies.wait(sent)
        self._leaving.clear()

    def _pack(self, tensor: Tensor) -> Tensor | OffloadedInput:
        if tensor.dim() < 3 or tensor.device.type != self._device.type:
            return tensor
        source = tensor.detach()
        host = self._take(source)
        sent = self._copies.run(lambda: host.copy_(source, non_blocking=True), [self._copies.mark()])
        self._leaving.append((source, host, sent))  # memory in a copy's hands must not be given out again
        kept = OffloadedInput(host, sent, source.device, self._before)
        self._block.add(kept)
        return kept

    def _unpack(self, kept: Tensor | OffloadedInput) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.spent:
            raise RuntimeError("a second backward pass through a graph whose checkpoint inputs were on the host")
        self._let_go()
        tensor, arrived = self._fetch(kept)
        self._copies.wait(arrived)
        kept.back, kept.spent = None, True
        self._spare[kept.host.shape, kept.host.dtype].append(kept.host)
        for earlier in kept.before:
            self._fetch(earlier)
        return tensor

    def _fetch(self, kept: OffloadedInput) -> tuple[Tensor, CopyEvent]:
        """A tensor on its way back; started if it is not yet."""
        if kept.back is None:
            # Taken from the computation's own pool: the copy waits until what used this memory before is done with it.
            tensor = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=kept.device)
            after = [self._copies.mark(), kept.sent]
            host = kept.host
            kept.back = (tensor, self._copies.run(lambda: tensor.copy_(host, non_blocking=True), after))
        return kept.back

    def _take(self, like: Tensor) -> Tensor:
        """A host buffer. The queue is in order: what is read from a spare one is read before it is filled again."""
        spare = self._spare[like.shape, like.dtype]
        if spare:
            return spare.pop()
        self.host_bytes += like.nbytes
        return host_like(like, self._device)
