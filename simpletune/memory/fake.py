"""Fake tensors that the project's own code runs on: shapes, dtypes and storages' sizes, no values and no memory.

Everything that must stand in for something else under fake tensors stands here, each with its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


class _Fake(FakeTensorMode):
    """Fake tensors whose numbers the host may read: each is 1.

    The step core reads nothing from the device. What is read are an optimizer's own step counters, which torch keeps
    in host memory; their value is of no consequence for memory.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Everything else passes."""
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return super().__torch_dispatch__(function, types, args, kwargs)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within this context every tensor made is fake. Real tensors must not be used in it."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(_quantile_maps())
        stack.enter_context(_Fake())
        yield


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


@contextmanager
def _quantile_maps() -> Iterator[None]:
    """bitsandbytes makes the table of its 8-bit numbers by reading tensors; its size is 256 whatever it holds."""
    from bitsandbytes import functional

    make = functional.create_dynamic_map

    @functools.wraps(make)
    def create_dynamic_map(*args: Any, **kwargs: Any) -> Tensor:
        return torch.empty(256)

    with mock.patch.object(functional, "create_dynamic_map", create_dynamic_map):
        yield
