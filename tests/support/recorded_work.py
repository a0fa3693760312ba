"""What estimate/timing/work.py records of a call."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.estimate.timing.sections import KernelWork
from simpletune.estimate.timing.work import works_of


def seen(call: Callable[[], object]) -> list[KernelWork]:
    """Run a call; return the work of its operators, in order."""
    found: list[KernelWork] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # noqa: ANN001, ANN202
            output = op(*args, **(kwargs or {}))
            found.extend(works_of(op, args, kwargs or {}, output))
            return output

    with See():
        call()
    return found
