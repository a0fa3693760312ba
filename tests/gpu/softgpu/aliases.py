"""CPU tensors at the addresses of CUDA tensors. They keep nothing alive: the allocator owns memory, as on a card."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_storages: dict[tuple[int, int], torch.UntypedStorage] = {}
KEPT = 20_000


def _storage(address: int, count: int) -> torch.UntypedStorage:
    known = _storages.get((address, count))
    if known is None:
        if len(_storages) >= KEPT:
            _storages.clear()
        memory = (ctypes.c_char * count).from_address(address)
        with torch.inference_mode(False):
            known = torch.frombuffer(memory, dtype=torch.uint8, count=count).untyped_storage()
        _storages[address, count] = known
    return known


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor with the address, shape and strides of a tensor of any device."""
    storage = tensor.untyped_storage()
    count = storage.nbytes()
    if count == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    found = torch.empty(0, dtype=tensor.dtype)
    found.set_(_storage(storage.data_ptr(), count), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        found = torch._conj(found)
    return torch._neg_view(found) if tensor.is_neg() else found


def on_cpu(value: object) -> object:
    """Convert an argument of a CUDA operator for the CPU's operator.

    CUDA tensors are aliased. A CPU tensor of no dimensions is copied, as a launch copies it.
    """
    if isinstance(value, Tensor):
        if value.device.type == "cuda":
            return alias(value)
        return value.clone() if value.dim() == 0 else alias(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_cpu, value)) if type(value) in (list, tuple) else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return value
