"""How a run ends before its last step: what is said then, and how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from simpletune.models.compile import failure as compiling_failed
from simpletune.runs import checkpoint
from simpletune.system.console import say
from simpletune.system.signals import Stopped
from simpletune.training.out_of_memory import memory_by_kind, out_of_memory

if TYPE_CHECKING:
    from simpletune.training.run import Run


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Within this context a full device and a compiler's failure are errors in words, and a stop says what is kept.

    Raises:
        UserError: instead of the device's or the compiler's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        kinds = memory_by_kind(run.transformer, run.core.optimizer, run.accelerator.device)
        raise out_of_memory(run.core.config, kinds, error, run.folder) from None
    except RuntimeError as error:
        failed = compiling_failed(error)
        if failed is None:
            raise
        raise failed from error
    except Stopped:
        announce_stopped(run)
        raise


def announce_stopped(run: Run) -> None:
    """Say what a run that was asked to stop has kept."""
    if not run.main:
        return
    found = checkpoint.list_checkpoints(run.folder)
    kept = f"step {found[-1][0]} of {run.steps} is saved: {found[-1][1]}" if found else "before the first step"
    say(f"stopped: {kept}")
