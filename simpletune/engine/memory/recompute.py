"""Compute a function's saved tensors a second time, when the backward pass needs the first of them.

``torch.utils.checkpoint`` does this with ``use_reentrant=False``: the same tensors, sums and order, and the same end of
the second pass as soon as it has saved the last tensor. It also serves graphs that are used twice or in part, and its
books for them are a large part of what a step costs the host. Here a graph has one backward pass, by which all of its
tensors are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

T = TypeVar("T")
Slot = list[Tensor]
"""A saved tensor: empty until it is computed again, and after it has been used."""


class _Enough(Exception):
    """The second pass has saved the last tensor."""


class _Inputs(torch.autograd.Function):
    """A node that only saves a function's inputs, under the hooks of whoever encloses it (to offload them)."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("nothing depends on it")


class _Pass:
    """A pass of a function, whose saved tensors are slots until its second pass fills them."""

    def __init__(
        self,
        function: Callable[..., object],
        args: Sequence[object],
        again: AbstractContextManager[object],
        random: bool,
    ):
        self._function, self._again = function, again
        self._inputs = _Inputs.apply(torch.empty(0, requires_grad=True), *_tensors(args))
        self._args = [None if isinstance(arg, Tensor) else arg for arg in args]
        self._where = [number for number, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._autocast = _autocast_contexts(args)
        self._random = (torch.get_rng_state(), *get_device_states(*_tensors(args))) if random else None
        self._slots: list[Slot] = []

    def save(self, tensor: Tensor) -> Slot:
        slot: Slot = []
        self._slots.append(slot)
        return slot

    def load(self, slot: Slot) -> Tensor:
        if not slot:
            self._fill()
        return slot.pop()

    def _fill(self) -> None:
        """Run the function again, and fill the slots with what it saves."""
        slots, self._slots = self._slots, []
        if not slots:
            raise RuntimeError("cannot run a second backward pass: recomputed tensors are freed after the first")
        count, found = len(slots), 0

        def save(tensor: Tensor) -> Tensor:
            nonlocal found
            slots[found].append(tensor := tensor.detach())
            found += 1
            if found == count:
                raise _Enough
            return tensor

        args = list(self._args)
        for number, tensor in zip(self._where, self._inputs.grad_fn.saved_tensors, strict=True):
            args[number] = tensor.detach().requires_grad_(tensor.requires_grad)
        with (
            _restore_random(self._random),
            torch.enable_grad(),
            saved_tensors_hooks(save, _refuse_backward),
            self._again,
        ):
            try:
                with self._autocast():
                    self._function(*args)
            except _Enough:
                return
        raise RuntimeError(f"a recomputation saved {found} tensors, and the forward pass {count}")


def recompute(
    function: Callable[..., T],
    args: Sequence[object],
    first: AbstractContextManager[object] | None = None,
    again: AbstractContextManager[object] | None = None,
    random: bool = False,
) -> T:
    """Run a function, and compute what its gradients need again in the backward pass, of which there may be one.

    ``function`` must save the same tensors both times, and draws random numbers if ``random``. Tensors among ``args``
    are saved as an operation saves its inputs, those inside of lists not. ``first`` and ``again`` are the contexts of
    the two passes, of which the second may end before the function does.
    """
    own = _Pass(function, args, again or nullcontext(), random)
    with saved_tensors_hooks(own.save, own.load), first or nullcontext():
        return function(*args)


def _tensors(args: Sequence[object]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]


def _refuse_backward(tensor: Tensor) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward pass")


def _autocast_contexts(args: Sequence[object]) -> Callable[[], AbstractContextManager[object]]:
    """Return a maker of contexts with the present autocast of the arguments' device."""
    device = next((tensor.device.type for tensor in _tensors(args)), "cpu")
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype, cached = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype, cache_enabled=cached)


@contextmanager
def _restore_random(states: tuple[Any, ...] | None) -> Iterator[None]:
    """Restore states of the random generators within this context; None leaves them alone."""
    if states is None:
        yield
        return
    cpu, devices, own = states
    with torch.random.fork_rng(devices):
        torch.set_rng_state(cpu)
        set_device_states(devices, own)
        yield
