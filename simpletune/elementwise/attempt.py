"""Run a kernel of this folder, or torch's operators if one has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from simpletune.printable import reason_of
from simpletune.system.console import say

T = TypeVar("T")
given_up: dict[torch.device, str] = {}
"""Devices whose kernels failed, and why."""


def attempt(device: torch.device, kernel: Callable[[], T], plain: Callable[[], T]) -> T:
    """Run a kernel. If it fails, log this once for the device, and use torch's operators there from then on.

    Args:
        device: device that computes.
        kernel: runs the kernel; imports what it needs.
        plain: computes the same by torch's operators.

    Raises:
        torch.OutOfMemoryError: passed on, because torch's operators would need even more memory.
        torch.AcceleratorError: the device is lost.
    """
    if device not in given_up:
        try:
            return kernel()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            given_up[device] = reason_of(error)
            say(f"norms, gates and residuals by torch's operators on {device}, which is slower: {given_up[device]}")
    return plain()
