"""Simulate what the first of several processes does when they shard the weights (``train.fsdp``).

torch's "fake" process group exchanges nothing; its collectives return tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import distributed

_processes = 1
_groups: dict[int, distributed.ProcessGroup | None] = {}  # never destroyed: torch would forget all groups' names


@contextmanager
def simulate_one_of(processes: int) -> Iterator[None]:
    """Predict one of this many processes within this context."""
    global _processes
    before, _processes = _processes, processes
    try:
        yield
    finally:
        _processes = before


def simulated_process_count() -> int:
    """Return the number of processes of the predicted run."""
    return _processes


@contextmanager
def fake_processes(processes: int) -> Iterator[None]:
    """Make this process the first of a fake group within this context. Restores a real group at the end."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from simpletune.engine.memory.fake import replace_attribute

    if processes not in _groups:
        with replace_attribute(c10d._world, "default_pg", None):
            distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
            _groups[processes] = c10d._world.default_pg
    with replace_attribute(c10d._world, "default_pg", _groups[processes]):
        yield


@contextmanager
def count_gathered() -> Iterator[None]:
    """Count what torch gathers as weights within this context, and what it sums as gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from simpletune.engine.memory.fake import replace_attribute

    kinds = {"unshard": "weights", "wait_for_unshard": "weights", "post_backward": "gradients"}
    with ExitStack() as stack:
        for name, kind in kinds.items():
            stack.enter_context(
                replace_attribute(FSDPParamGroup, name, _allocating(kind, getattr(FSDPParamGroup, name)))
            )
        yield


def _allocating(kind: str, method: Callable[..., object]) -> Callable[..., object]:
    from simpletune.engine.memory.accounting import allocating

    def counted(*arguments: object, **named: object) -> object:
        with allocating(kind):
            return method(*arguments, **named)

    return counted
