"""A block's weights in host memory: one flat buffer, and the tensors that point into it or into a slot of a device."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from simpletune.memory.copy_stream import host_bytes
from simpletune.tensors import all_tensors, plain_tensors

ALIGNMENT = 512  # bytes; kernels read vectors of 16, and the device's own allocator gives out no less


def own_plain_tensors(block: nn.Module, trained: bool) -> list[Tensor]:
    """The plain tensors of a block that can live elsewhere: frozen ones, and trained ones if asked for."""
    found: dict[int, Tensor] = {}
    for tensor in all_tensors(block):
        if trained or not tensor.requires_grad:
            found |= {id(plain): plain for plain in plain_tensors(tensor)}
    return list(found.values())


class HostBlock:
    """A block's tensors, moved into one flat host buffer.

    Args:
        tensors: they keep their identity: only what they point at changes.
        device: what they will be computed on.
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
        """The tensors as they lie in a buffer of the same layout.

        Args:
            flat: uint8 [n], on any device, n >= nbytes.
        """
        return [
            flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(self._offsets, self.tensors, strict=False)
        ]

    def point_at(self, views: list[Tensor]) -> None:
        """Let the tensors have these values."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def point_at_host(self) -> None:
        """Let the tensors have their values in host memory."""
        self.point_at(self._at_home)

    def value_of(self, tensor: Tensor) -> Tensor:
        """Where one of the tensors lives in host memory."""
        return self._at_home[self._number[id(tensor)]]
