"""Simulate what the first of several processes does when these divide the weights among them (``train.sharding``).

torch's group of processes that exchange nothing ("fake") gives its collectives the shapes that they would return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from torch import distributed
from torch.distributed import distributed_c10d as c10d

from simpletune.memory.accounting import allocating
from simpletune.memory.fake import replaced

_processes = 1


@contextmanager
def one_of(processes: int) -> Iterator[None]:
    """Predict one of this number of processes within this context."""
    global _processes
    before, _processes = _processes, processes
    try:
        yield
    finally:
        _processes = before


def simulated_processes() -> int:
    """How many processes the predicted run has."""
    return _processes


@contextmanager
def fake_processes(processes: int) -> Iterator[None]:
    """Make this process the first of a group that exchanges nothing. A real group is put back at the end."""
    with _default(_fake_group(processes)):
        yield


@contextmanager
def counting_gathered() -> Iterator[None]:
    """Count what torch gathers within this context as weights, and what it sums as gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    kinds = {"unshard": "weights", "wait_for_unshard": "weights", "post_backward": "gradients"}
    with ExitStack() as stack:
        for name, kind in kinds.items():
            stack.enter_context(replaced(FSDPParamGroup, name, _allocating(kind, getattr(FSDPParamGroup, name))))
        yield


def _allocating(kind: str, method: Callable[..., object]) -> Callable[..., object]:
    def counted(*arguments: object, **named: object) -> object:
        with allocating(kind):
            return method(*arguments, **named)

    return counted


@contextmanager
def _default(group: distributed.ProcessGroup | None) -> Iterator[None]:
    """Make a group torch's default within this context; None: there is none."""
    before = c10d._world.default_pg
    c10d._world.default_pg = group
    try:
        yield
    finally:
        c10d._world.default_pg = before


@cache
def _fake_group(processes: int) -> distributed.ProcessGroup:
    """Make a group. It stays, because leaving one would make torch forget the names of all."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _default(None):
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
        made = c10d._world.default_pg
    assert made is not None
    return made
