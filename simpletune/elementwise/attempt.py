"""Run a kernel of this folder, or torch's operators where one has failed."""

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
    """Run a kernel; log once that a device's kernels failed, and from then on run torch's operators there.

    Args:
        device: that computes.
        kernel: imports what it needs.
        plain: the same by torch's operators.

    Raises:
        torch.OutOfMemoryError: torch's operators would need more memory still.
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
