"""Fake tensors that the project's own code runs on: shapes, dtypes and storages' sizes, no values and no memory.

Everything that must stand in for something else under fake tensors stands here, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode


class _Fake(FakeTensorMode):
    """Fake tensors whose numbers the host may read: each is 1.

    The step core reads nothing from the device. What is read are an optimizer's own step counters, which torch keeps
    in host memory; their value is of no consequence for memory.
    """

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Everything else passes."""
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if isinstance(args[0], Tensor) and args[0].is_floating_point() else 1
        return super().__torch_dispatch__(function, types, args, kwargs or {})


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within this context every tensor made is fake. Real tensors must not be used in it."""
    from bitsandbytes import functional

    with (
        _replaced(nn.Module, "_apply", _apply),
        _replaced(functional, "create_dynamic_map", _empty_dynamic_map),
        _Fake(),
    ):
        yield


@contextmanager
def _replaced(owner: type | ModuleType, name: str, value: object) -> Iterator[None]:
    """Another value for an attribute of a class or module within this context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` by replacement.

    torch's own swaps the content of fake parameters, which fails: their mode holds weak references to them.
    """
    for child in module.children() if recurse else ():
        _apply(child, function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                applied = function(parameter)
            if applied is not parameter:
                module._parameters[name] = nn.Parameter(applied, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def _empty_dynamic_map(*_: object, **__: object) -> Tensor:
    """bitsandbytes computes the table of its 8-bit numbers by reading tensors; it always has 256 entries."""
    return torch.empty(256)
