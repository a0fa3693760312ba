"""Copies between host and device that run beside the computation, and host memory that they can read at full speed.

An event stands for work that was queued; it is reached when that work is done.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from simpletune.memory import accounting
from simpletune.memory.snapshot import HOST

CopyEvent = torch.cuda.Event | None
"""A CUDA event; None: the work is done already."""


class Copies(Protocol):
    """A queue of copies beside the computation. Work of one queue is done in order."""

    def mark(self) -> CopyEvent:
        """Everything that the computation has been given so far."""

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        """Queue copies that start once other work is done."""

    def wait(self, event: CopyEvent) -> None:
        """What the computation is given from now on starts once that work is done."""

    def join(self, event: CopyEvent) -> None:
        """The host waits until that work is done."""


class HostCopies:
    """On the CPU: work is done when it is handed out."""

    def mark(self) -> CopyEvent:
        """The computation is done already."""
        return None

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        """Do it now."""
        with torch.no_grad():
            work()
        return None

    def wait(self, event: CopyEvent) -> None:
        """Nothing is left to wait for."""

    def join(self, event: CopyEvent) -> None:
        """Nothing is left to wait for."""


class CudaCopies:
    """On a CUDA device: a stream of its own; the computation is the stream that is current where a method is called.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> CopyEvent:
        """An event behind everything that the current stream holds."""
        return torch.cuda.current_stream(self._device).record_event()

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        """Queue it on the side stream."""
        for earlier in after:
            if earlier is not None:
                self._stream.wait_event(earlier)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    def wait(self, event: CopyEvent) -> None:
        """The current stream waits; the host does not."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def join(self, event: CopyEvent) -> None:
        """The host waits for the event."""
        if event is not None:
            event.synchronize()


def copies_for(device: torch.device) -> Copies:
    """A queue of copies for a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class _PinnedPages(mmap.mmap):
    """Anonymous pages that a CUDA device reads directly, for as long as a tensor holds them."""

    pinned_at: int | None = None
    """Their address, once they are pinned."""

    def __del__(self) -> None:
        if self.pinned_at is not None and not sys.is_finalizing():  # at exit the driver lets go of all pages by itself
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def host_bytes(count: int, device: torch.device) -> Tensor:  # uint8 [count]
    """Uninitialised host memory; pinned where the device is CUDA, so that copies run beside the computation.

    Pinned in place: PyTorch's own pinned allocator rounds up to a power of two, which would cost up to half of it.
    """
    if device.type != "cuda" or count == 0:
        buffer = torch.empty(count, dtype=torch.uint8)
        accounting.register([buffer], HOST)
        return buffer
    pages = _PinnedPages(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), count, 0))
    pages.pinned_at = buffer.data_ptr()
    return buffer


def host_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Uninitialised host memory for a tensor's values (see ``host_bytes``)."""
    return host_bytes(tensor.nbytes, device).view(tensor.dtype).view(tensor.shape)
