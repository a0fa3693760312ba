"""Fake tensors for simulating the project's own code: shapes, dtypes and storage sizes without values or memory.

Every replacement that fake tensors need is here, with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from simpletune.engine.memory.fake_results import FakeResults

DEVICE, SCALAR = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default
RESULTS = FakeResults()
# Of torch 2.13's include/ATen/autocast_mode.h, AT_FORALL_FP32: the functions that modules call.
IN_FP32 = ("layer_norm", "group_norm", "rms_norm", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "softplus")
_active: Fake | None = None


class Fake(FakeTensorMode):
    """Fake tensors that the host may read as numbers: each is 1.

    The step core reads nothing from the device. Optimizers read only their own step counters, which torch keeps in host
    memory, and whose value does not affect memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache_enabled = False  # torch's own cache of results: ours has answered before

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Return 1 for a host read; run every other operation, or return what it returned before."""
        if function is DEVICE:  # asked constantly
            assert isinstance(args[0], FakeTensor)
            return args[0]._fake_device
        if function is SCALAR:
            return 1.0 if isinstance(args[0], Tensor) and args[0].is_floating_point() else 1
        run = super().__torch_dispatch__
        return RESULTS.call(self, function, args, kwargs or {}, lambda: run(function, types, args, kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in a simulation, so dynamo need not be disabled around every operation."""
        return False


@contextmanager
def fake_tensors(again: Fake | None = None) -> Iterator[None]:
    """Make every tensor created in this context fake. Do not use real tensors in it. ``again`` is the mode of an
    earlier context, to continue with its tensors."""
    with (
        replace_attribute(nn.Module, "_apply", _apply),
        again or Fake() as mode,
        replace_attribute(sys.modules[__name__], "_active", mode),
    ):
        yield


def active_mode() -> Fake | None:
    """Return the active fake mode, if there is one."""
    return _active


@contextmanager
def replace_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a class, module or object within this context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace parameters as ``nn.Module._apply`` does.

    torch's own swaps the contents of fake parameters, which fails because their mode holds weak references to them.
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
def autocast_like_cuda() -> Iterator[None]:
    """Make the CPU's autocast behave like CUDA's, so that a simulated step keeps the same tensors as one on a GPU.

    Both compute products in 16 bits, but CUDA computes norms and losses in fp32, and the CPU in the type of their
    input. For SD3 Medium at 1024 px the wider activations are 84 MiB of a LoRA's peak.
    """

    def wide(value: object) -> object:
        is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_narrow else value  # type: ignore[attr-defined]

    def in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(function)
        def call(*args: object, **kwargs: object) -> Tensor:
            if not torch.is_autocast_enabled("cpu"):
                return function(*args, **kwargs)
            return function(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})

        return call

    with ExitStack() as stack:
        for name in IN_FP32:
            stack.enter_context(replace_attribute(functional, name, in_fp32(getattr(functional, name))))
        yield
