"""Asynchronous copies between host and device, and pinned host memory for them.

An event represents queued work and completes with it.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from weakref import finalize

import torch
from torch import Tensor

from simpletune.engine.memory import accounting
from simpletune.engine.memory.snapshot import HOST
from simpletune.system.console import say
from simpletune.system.portable import private_pages

CopyEvent = torch.cuda.Event | None
"""A CUDA event; None for completed work."""


class Copies:
    """An ordered queue of copies that overlap with the computation; this one, the CPU's, runs them at once."""

    def mark(self) -> CopyEvent:
        """Return an event that completes with everything queued on the computation so far."""
        return None

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        """Queue copies that start after the given events."""
        with torch.no_grad():
            work()
        return None

    def wait(self, event: CopyEvent) -> None:
        """Make later work of the computation, but not the host, wait for an event."""

    def join(self, event: CopyEvent) -> None:
        """Block the host until an event completes."""

    def finish(self) -> None:
        """Block the host until everything queued is done, or the device has failed."""


class CudaCopies(Copies):
    """Copies on a side stream of a CUDA device; the computation is the caller's current stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> CopyEvent:
        return torch.cuda.current_stream(self._device).record_event()

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        for earlier in after:
            if earlier is not None:
                self._stream.wait_event(earlier)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    def wait(self, event: CopyEvent) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def join(self, event: CopyEvent) -> None:
        if event is not None:
            event.synchronize()

    def finish(self) -> None:
        with suppress(torch.AcceleratorError):
            self._stream.synchronize()


def finish_before_freed(owner: object, queues: Sequence[Copies], memory: object) -> None:
    """Return when an object dies, finish its queues, and only then free the memory that their copies read or write."""
    # The caching allocator knows nothing of a queue of copies: it gives freed memory to the next tensor at once, and a
    # copy or fill that is still queued would overwrite that. An exception between two blocks leaves such copies behind.
    # The host waits, because the object may die in any thread, on any current stream.
    # Neither the queues nor the memory may refer to the object; collections of memory may change until it dies.
    finalize(owner, _finish, queues, memory).atexit = False  # at exit nothing is freed


def _finish(queues: Sequence[Copies], memory: object) -> None:
    for queue in queues:
        queue.finish()


_recorded: Callable[[], Copies] | None = None
"""Makes recorded queues in a simulation that predicts time."""


def copies_for(device: torch.device) -> Copies:
    """Create a queue of copies for a device."""
    if _recorded is not None:
        return _recorded()
    return CudaCopies(device) if device.type == "cuda" else Copies()


class PinnedPages(mmap.mmap):
    """Mapped pages that stay pinned for a CUDA device while any tensor uses them."""

    pinned_at: int | None = None
    """Their address once pinned."""

    def pin(self, address: int, count: int) -> None:
        """Pin the first ``count`` bytes of the pages, which begin at ``address``. Raises RuntimeError if the system or
        the driver does not allow it."""
        code = torch.cuda.cudart().cudaHostRegister(address, count, 0)
        if int(code):  # an enumeration's member, which is true in any case
            with suppress(torch.AcceleratorError):  # the runtime keeps the error until the next launch reports it
                torch.ones(1, device="cuda")
        torch.cuda.check_error(code)
        self.pinned_at = address

    def __del__(self) -> None:
        if self.pinned_at is not None and not sys.is_finalizing():  # at exit the driver unpins all pages
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def host_bytes(count: int, device: torch.device) -> Tensor:  # uint8 [count]
    """Allocate uninitialised host memory, pinned for a CUDA device so that copies overlap with the computation; where
    it cannot be pinned, pageable.

    Pins the pages in place, because PyTorch's pinned allocator rounds up to a power of two and may waste half.
    """
    if device.type != "cuda" or count == 0:
        buffer = torch.empty(count, dtype=torch.uint8)
        accounting.register([buffer], HOST)
        return buffer
    pages = private_pages(PinnedPages, count)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    try:
        pages.pin(buffer.data_ptr(), count)
    except RuntimeError as error:
        _say_not_pinned(str(error).partition("\n")[0])
    return buffer


def copy_to_pinned(tensor: Tensor) -> Tensor:
    """Copy a small tensor into memory that PyTorch pins and reuses; where it cannot be pinned, return the tensor."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        _say_not_pinned(str(error).partition("\n")[0])
        return tensor


@cache
def _say_not_pinned(reason: str) -> None:
    say(f"warning host memory cannot be pinned, so copies no longer overlap with the computation ({reason})")


def empty_on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate uninitialised host memory for a tensor's values (see ``host_bytes``)."""
    return host_bytes(tensor.nbytes, device).view(tensor.dtype).view(tensor.shape)
