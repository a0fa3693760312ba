"""Fall back to torch's operators on a device whose kernels fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from simpletune.system.console import say
from simpletune.system.printable import describe_exception

T = TypeVar("T")


def is_of_the_kernel(error: Exception) -> bool:
    """Whether an error may come from compiling or launching a kernel, not from the device or its memory."""
    return not isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)


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
        """Run a kernel, or torch's operators once a kernel has failed on this device.

        Args:
            device: that computes.
            kernel: also imports what it needs.
            plain: the same by torch's operators.

        Raises:
            torch.OutOfMemoryError: torch's operators would need more memory still.
            torch.AcceleratorError: the device is lost.
        """
        if device not in self.failed:
            try:
                return kernel()
            except Exception as error:
                if not is_of_the_kernel(error):
                    raise
                self.failed[device] = describe_exception(error)
                say(self._warning.format(device=device, reason=self.failed[device]))
        return plain()
