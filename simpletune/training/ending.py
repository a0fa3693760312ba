"""Explain why a run ended early and how to continue it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from simpletune.models.shared.compile import failure as compiling_failed
from simpletune.runs.summary import print_stopped
from simpletune.system.signals import Stopped
from simpletune.training.out_of_memory import memory_by_kind, out_of_memory

if TYPE_CHECKING:
    from simpletune.training.run import Run


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Within this context, explain a full device, a compiler failure and a stop.

    Raises:
        UserError: instead of the device's or the compiler's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        kinds = memory_by_kind(run.denoiser, run.core.optimizer, run.accelerator.device)
        raise out_of_memory(run.core.config, kinds, error, run.folder) from None
    except RuntimeError as error:
        failed = compiling_failed(error)
        if failed is None:
            raise
        raise failed from error
    except Stopped:
        if run.main:
            print_stopped(run.folder, run.steps)
        raise
