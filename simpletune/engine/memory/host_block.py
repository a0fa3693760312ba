"""A block's weights in flat host memory, with tensors that point into it or into a device slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simpletune.engine.memory.copy_stream import host_bytes
from simpletune.engine.memory.machine_weights import aligned, is_shared, shared_runs
from simpletune.engine.tensors import all_tensors, plain_tensors


def own_plain_tensors(block: nn.Module, trained: bool) -> list[Tensor]:
    """A block's plain tensors that can be offloaded: frozen ones, and with ``trained`` also trained ones."""
    found: dict[int, Tensor] = {}
    for tensor in all_tensors(block):
        if trained or not tensor.requires_grad:
            found |= {id(plain): plain for plain in plain_tensors(tensor)}
    return list(found.values())


def shared_tensors(blocks: Sequence[nn.Module]) -> set[int]:
    """The ids of tensors that several blocks share, such as a hypernetwork's: they stay on the device."""
    counts = Counter(number for block in blocks for number in {id(tensor) for tensor in all_tensors(block)})
    return {number for number, count in counts.items() if count > 1}


class HostBlock:
    """A block's tensors, moved into one flat host buffer. Tensors in pages shared by the machine's processes stay
    there.

    Args:
        tensors: the tensors; they keep their identity, and only their data pointers change.
        device: the device that computes with them.
    """

    def __init__(self, tensors: list[Tensor], device: torch.device):
        self.tensors = tensors
        self._pieces: list[tuple[int, Tensor]] = []
        """Pieces of host memory, each with its copy's offset in a buffer on the device."""
        self.nbytes = 0
        for run in shared_runs(tensors):
            self._add(run)
        places = {piece.data_ptr(): start for start, piece in self._pieces}
        self._offsets: list[int] = []
        own = 0
        for tensor in tensors:
            if is_shared(tensor):
                first = max(address for address in places if address <= tensor.data_ptr())
                self._offsets.append(places[first] + tensor.data_ptr() - first)
            else:
                self._offsets.append(self.nbytes + own)
                own += aligned(tensor.nbytes)
        shared = self.nbytes
        self._add(host_bytes(own, device))
        self._at_home = [
            tensor.detach() if start < shared else value_in(self._pieces[-1][1], start - shared, tensor)
            for start, tensor in zip(self._offsets, tensors, strict=True)
        ]
        self._number = {id(tensor): number for number, tensor in enumerate(tensors)}
        for start, tensor, view in zip(self._offsets, tensors, self._at_home, strict=True):
            if start >= shared:
                view.copy_(tensor.detach())
        self.point_at_host()

    def _add(self, piece: Tensor) -> None:
        self._pieces.append((self.nbytes, piece))
        self.nbytes += piece.numel()

    def copy_to(self, flat: Tensor) -> None:
        """Queue the copies of the block into a buffer: uint8 [n], n >= nbytes."""
        for start, piece in self._pieces:
            flat[start : start + piece.numel()].copy_(piece, non_blocking=True)

    def views(self, flat: Tensor) -> list[Tensor]:
        """View a buffer of the same layout as the block's tensors.

        Args:
            flat: uint8 [n], on any device, n >= nbytes.
        """
        return [value_in(flat, start, tensor) for start, tensor in zip(self._offsets, self.tensors, strict=True)]

    def point_at(self, views: list[Tensor]) -> None:
        """Point the tensors at these values."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def point_at_host(self) -> None:
        """Point the tensors at their values in host memory."""
        self.point_at(self._at_home)

    def value_of(self, tensor: Tensor) -> Tensor:
        """The host memory of one of the tensors."""
        return self._at_home[self._number[id(tensor)]]


def value_in(flat: Tensor, start: int, tensor: Tensor) -> Tensor:
    """View a part of a buffer as a tensor of the same type and shape as another one."""
    return flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
