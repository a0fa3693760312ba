"""Run tasks that must not fail a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from simpletune.stages.latent_cache import free_memory
from simpletune.system.printable import describe_exception

T = TypeVar("T")


class OptionalTasks:
    """Runs tasks; on failure, warns once per kind of error, and frees the task's device memory."""

    def __init__(self, device: torch.device, warn: Callable[[str], None]):
        self.device, self.warn = device, warn
        self._failed: set[tuple[str, type]] = set()

    def run(self, what: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Return what the task returns; None if it fails. It is tried again the next time."""
        try:
            return call(*arguments)
        except Exception as error:  # an optional task must not fail the run
            failed, kind = f"{what} failed ({describe_exception(error)})", (what, type(error))
        free_memory(self.device)  # here, because the error's traceback refers to the task's tensors
        if kind not in self._failed:
            self._failed.add(kind)
            self.warn(f"{failed}; training continues")
        return None
