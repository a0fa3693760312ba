"""One copy of frozen weights in host memory for all processes of a machine.

The first of these processes loads the weights into an anonymous file in memory (memfd_create(2)); the others open it
through ``/proc`` while the first one holds it open, and map the same pages. The system frees them when the last process
ends, however it ends, and limits on ``/dev/shm`` do not apply. Each process pins the pages for its own device.

While a model loads, the other processes allocate nothing for what stays on the host and keep only its shapes. ``table``
then says where the first process has put each tensor.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from simpletune.engine.memory.copy_stream import PinnedPages
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.engine.tensors import is_wrapper, move_own_tensors, own_tensors, plain_tensors, set_tensor, to_device
from simpletune.system.options import UserError
from simpletune.system.portable import memory_file

NAME = "simpletune-weights"  # in /proc/PID/maps
HEAD = mmap.PAGESIZE  # bytes before the first tensor, which identify the file
CPU = torch.device("cpu")


class SharedFile(NamedTuple):
    """Where the machine's other processes find the file: the process that holds it open, its descriptor there, and the
    random bytes at its beginning."""

    process: int
    handle: int
    token: bytes


class TensorLocation(NamedTuple):
    start: int  # its first byte
    dtype: torch.dtype
    shape: tuple[int, ...]


Table = Mapping[str, TensorLocation]
"""Places by the tensor's name in the model and the index of the plain tensor among those it consists of."""


class SharedPages(PinnedPages):
    """Pages that the processes of a machine share, as one of them maps them. They live as long as a tensor in them."""

    address: int

    def bytes_at(self, start: int, count: int) -> Tensor:  # uint8 [count]
        """View some of the pages."""
        return torch.frombuffer(self, dtype=torch.uint8, count=count, offset=start)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor lies in these pages; False for a fake one."""
        storage = tensor.untyped_storage()
        return storage.device == CPU and self.address <= storage.data_ptr() < self.address + len(self)


_MAPPED: WeakSet[SharedPages] = WeakSet()


class MachineWeights:
    """What one process needs to load weights into the pages (``fills``), or to find them there. Use ``create`` or
    ``join``."""

    def __init__(self, handle: int, room: int, fills: bool):
        self.fills = fills
        self._handle = handle
        self._used = HEAD
        self._pages = SharedPages(handle, room)  # raises OSError or ValueError
        self._pages.address = self._pages.bytes_at(0, 1).data_ptr()
        _MAPPED.add(self._pages)

    @classmethod
    def create(cls, room: int) -> MachineWeights:
        """Make the file, in the first process of a machine, for at most ``room`` bytes. Raises OSError if the system
        has no such files, or cannot map that much."""
        handle = memory_file(NAME)
        try:
            os.ftruncate(handle, HEAD + room)
            os.write(handle, secrets.token_bytes(16))
            return cls(handle, HEAD + room, fills=True)
        except (OSError, ValueError) as error:
            os.close(handle)
            raise OSError(f"{room / 2**30:.0f} GiB of addresses cannot be mapped ({error})") from None

    @property
    def offer(self) -> SharedFile:
        """What the others need to join."""
        return SharedFile(os.getpid(), self._handle, bytes(self._pages[:16]))

    @classmethod
    def join(cls, offer: SharedFile) -> MachineWeights:
        """Map the file of the first process, in another one. Raises OSError if it cannot be opened or mapped, or that
        process is on another machine."""
        file = f"/proc/{offer.process}/fd/{offer.handle}"
        handle = os.open(file, os.O_RDWR)
        try:
            if os.read(handle, 16) != offer.token:
                raise OSError(f"{file} is not the file of the first process of this machine")
            return cls(handle, os.fstat(handle).st_size, fills=False)
        except ValueError as error:  # of mmap
            raise OSError(f"{file} cannot be mapped ({error})") from None
        finally:
            os.close(handle)

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the last tensor."""
        return self._used - HEAD

    def keep(self, tensor: Tensor) -> Tensor:
        """Move a loading model's tensor to the host: into these pages, or, in a process that does not fill them, only
        its shape until ``point``."""
        if is_wrapper(type(tensor)):
            tensor = to_device(tensor, CPU)
            for plain in plain_tensors(tensor):
                plain.data = self._place(plain)
            return tensor
        return self._place(tensor)

    def _place(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes == 0:
            return to_device(tensor, CPU)
        if not self.fills:
            return self._pages.bytes_at(0, HEAD).view(tensor.dtype)[0].expand(tensor.shape)
        found = self._at(TensorLocation(self._used, tensor.dtype, tuple(tensor.shape)), tensor.nbytes)
        self._used += round_to_block(tensor.nbytes)  # kernels read vectors of 16 bytes
        return found.copy_(tensor)

    def _at(self, place: TensorLocation, nbytes: int) -> Tensor:
        return self._pages.bytes_at(place.start, nbytes).view(place.dtype).view(place.shape)

    def _tensors(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Return a model's plain tensors that are kept here, by their names in a table."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            for number, plain in enumerate(plain_tensors(tensor)):
                if self._pages.holds(plain):
                    yield f"{name}:{number}", plain

    def table(self, model: nn.Module) -> Table:
        """Return where this process, which fills the pages, has put a loaded model's tensors."""
        return {
            name: TensorLocation(plain.data_ptr() - self._pages.address, plain.dtype, tuple(plain.shape))
            for name, plain in self._tensors(model)
        }

    def point(self, model: nn.Module, table: Table) -> None:
        """Point the tensors of a loaded model at the values that the first process has loaded. Raises UserError if that
        process has loaded another model."""
        tensors = dict(self._tensors(model))
        own = {(name, plain.dtype, tuple(plain.shape)) for name, plain in tensors.items()}
        if odd := own ^ {(name, place.dtype, place.shape) for name, place in table.items()}:
            raise UserError(
                "the processes of this machine have loaded different weights: "
                f"{min(name for name, *_ in odd).rpartition(':')[0]}. Start all of them again, with the same files"
            )
        for name, plain in tensors.items():
            plain.data = self._at(table[name], plain.nbytes)
            self._used = max(self._used, table[name].start + round_to_block(plain.nbytes))

    def pin(self, device: torch.device) -> None:
        """Pin the pages for a CUDA device, so that copies overlap with the computation. Raises RuntimeError if the
        system or the driver does not allow it."""
        if device.type == "cuda" and self.nbytes:
            self._pages.pin(self._pages.address, self._used)

    def copy_out(self, model: nn.Module) -> None:
        """Copy a model out of these pages into memory of its own."""
        for _, plain in list(self._tensors(model)):
            plain.data = plain.clone()

    def close(self) -> None:
        """Close the file, so that no further process can join."""
        if self.fills:
            os.close(self._handle)


_LOADING: list[MachineWeights] = []


@contextmanager
def shared_loading(weights: MachineWeights | None) -> Iterator[None]:
    """Within this context, keep a loading model's host tensors in the machine's pages; None: in its own memory."""
    _LOADING.extend([weights] if weights is not None else [])
    try:
        yield
    finally:
        _LOADING.clear()


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a loading model's tensor to the host, or to the pages that the machine's processes share."""
    return _LOADING[-1].keep(tensor) if _LOADING else to_device(tensor, CPU)


def keep_on_host(module: nn.Module) -> None:
    """Move a module's own frozen tensors, but not its children's, to the host as ``host_copy`` does."""
    if not _LOADING:
        move_own_tensors(module, CPU)
        return
    for name, tensor in own_tensors(module):
        set_tensor(module, name, host_copy(tensor.detach()))


def is_shared(tensor: Tensor) -> bool:
    """Return whether a plain tensor lies in pages that the machine's processes share."""
    return any(pages.holds(tensor) for pages in _MAPPED)


def shared_runs(tensors: Sequence[Tensor]) -> list[Tensor]:  # uint8 [n] each
    """View the shared pages that hold plain tensors, and only these, in as few contiguous pieces as possible."""
    found: list[Tensor] = []
    for pages in _MAPPED:
        inside = sorted((tensor.data_ptr() - pages.address, tensor.nbytes) for tensor in tensors if pages.holds(tensor))
        runs: list[list[int]] = []
        for first, nbytes in inside:
            if runs and first == runs[-1][1]:
                runs[-1][1] = first + round_to_block(nbytes)
            else:
                runs.append([first, first + round_to_block(nbytes)])
        found += [pages.bytes_at(first, last - first) for first, last in runs]
    return found
