"""Fall back to torch's operators on a device whose kernels fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from simpletune.system.console import say
from simpletune.system.printable import describe_exception

T = TypeVar("T")


def is_of_the_kernel(error: Exception) -> bool:
    """Return whether an error may come from compiling or launching a kernel, not from the device or its memory."""
    return not (isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or _is_out_of_memory(error))


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether Triton found no memory on the device for a kernel, which it reports as a plain RuntimeError."""
    return "Triton Error" in str(error) and "out of memory" in str(error)


def run_with_room(kernel: Callable[[], T]) -> T:
    """Run a kernel, once more without the memory that torch caches if Triton finds none for it. Raises
    torch.OutOfMemoryError if there is still none."""
    try:
        return kernel()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    try:
        return kernel()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


class Fallback:
    """Kernels with a form by torch's operators, which takes over for the rest of the process where they fail.

    Args:
        warning: what is logged once for each device, with ``{device}`` and ``{reason}``.
    """

    def __init__(self, warning: str):
        self._warning = warning
        self.failed: dict[torch.device, str] = {}
        """Devices whose kernels have failed, and why."""

    def run(self, device: torch.device, kernel: Callable[[], T], plain: Callable[[], T]) -> T:
        """Run a kernel, which also imports what it needs, or torch's operators once a kernel has failed on this device.
        Raises torch.OutOfMemoryError if torch's operators would need more memory still, and torch.AcceleratorError if
        the device is lost."""
        if device not in self.failed:
            try:
                return run_with_room(kernel)
            except Exception as error:
                if not is_of_the_kernel(error):
                    raise
                self.failed[device] = describe_exception(error)
                say(self._warning.format(device=device, reason=self.failed[device]))
        return plain()

    def define(
        self,
        library: torch.library.Library,
        schema: str,
        plain: Callable[..., object],
        kernel: str | Callable[..., object],
    ) -> Callable[..., Any]:
        """Define an operator whose gradients an autograd function defines.

        Args:
            library: of ``simpletune``'s operators.
            schema: its name and types; the first argument is a tensor or a list of them.
            plain: computes it by torch's operators, which is all that the CPU does.
            kernel: launches the kernel on CUDA, or the module whose function of the operator's name does. Triton is
                imported only when it is called.

        Returns:
            A function that calls the operator: on CUDA without the dispatcher, which takes the host longer than the
            launch, unless a dispatch mode or a profiler watches.
        """
        name = schema.partition("(")[0]
        loaded: list[Callable[..., object]] = [] if isinstance(kernel, str) else [kernel]

        def on_cuda(first: Tensor | Sequence[Tensor], *rest: object) -> object:
            device = (first if isinstance(first, Tensor) else first[0]).device

            def launch() -> object:
                if not loaded:
                    assert isinstance(kernel, str)
                    loaded.append(getattr(import_module(kernel), name))
                return loaded[0](first, *rest)

            return self.run(device, launch, lambda: plain(first, *rest))

        library.define(schema)
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        library.impl(name, plain, "CPU")
        library.impl(name, on_cuda, "CUDA")
        operator = getattr(torch.ops.simpletune, name).default

        def call(first: Tensor | Sequence[Tensor], *rest: object) -> Any:
            if torch.compiler.is_compiling():
                return operator(first, *rest)
            tensor = first if isinstance(first, Tensor) else first[0]
            if type(tensor) is not Tensor or not tensor.is_cuda or _is_watched():
                return operator(first, *rest)
            return on_cuda(first, *rest)

        return call


def _is_watched() -> bool:
    """Return whether a dispatch mode or a profiler must see operators."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.autograd._profiler_enabled()
