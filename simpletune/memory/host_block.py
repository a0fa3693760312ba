"""A block's weights in one flat host buffer, with tensors that point into it or into a device slot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simpletune.memory.copy_stream import host_bytes
from simpletune.tensors import all_tensors, plain_tensors

ALIGNMENT = 512  # bytes, like the device's allocator; kernels read vectors of 16


def own_plain_tensors(block: nn.Module, trained: bool) -> list[Tensor]:
    """The plain tensors of a block that can be offloaded: frozen ones, and with ``trained`` also trained ones."""
    found: dict[int, Tensor] = {}
    for tensor in all_tensors(block):
        if trained or not tensor.requires_grad:
            found |= {id(plain): plain for plain in plain_tensors(tensor)}
    return list(found.values())


def shared_tensors(blocks: Sequence[nn.Module]) -> set[int]:
    """The ids of tensors that several blocks have, as those of a hypernetwork: they stay on the device."""
    counts = Counter(number for block in blocks for number in {id(tensor) for tensor in all_tensors(block)})
    return {number for number, count in counts.items() if count > 1}


class HostBlock:
    """A block's tensors, moved into one flat host buffer.

    Args:
        tensors: the tensors; they keep their identity, and only their data pointers change.
        device: the device that computes with them.
    """

    def __init__(self, tensors: list[Tensor], device: torch.device):
        self.tensors = tensors
        self._offsets = [0]
        for tensor in tensors:
            self._offsets.append(self._offsets[-1] + math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT)
        self.flat = host_bytes(self._offsets[-1], device)
        self._at_home = self.views(self.flat)
        self._number = {id(tensor): number for number, tensor in enumerate(tensors)}
        for tensor, view in zip(tensors, self._at_home, strict=True):
            view.copy_(tensor.detach())
        self.point_at_host()

    @property
    def nbytes(self) -> int:
        """The size of the buffer."""
        return self.flat.numel()

    def views(self, flat: Tensor) -> list[Tensor]:
        """View a buffer of the same layout as the block's tensors.

        Args:
            flat: uint8 [n], on any device, n >= nbytes.
        """
        return [
            flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(self._offsets, self.tensors, strict=False)
        ]

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
