"""Shard a model's parameters over processes with torch's ``fully_shard`` (FSDP2; arXiv:2304.11277), block by block.

Each process holds some rows of every parameter, its gradient and its optimizer state. A block's whole weights exist
only while it computes: they are gathered before its forward pass and again before its backward pass, after which its
gradients are summed in fp32 and scattered to the processes.

torch holds the rows in a ``DTensor``. Optimizers, averages and checkpoints get them as plain tensors in the same
memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import _disable_current_modes

from simpletune.engine.optim.place import ParameterRange
from simpletune.engine.tensors import trained_parameters

KEY = "_simpletune_sharding"
CLIP_EPS = 1e-6  # as in torch's clip_grad_norm_


@dataclass(frozen=True)
class ParameterPart:
    """A process's part of a parameter: a contiguous range of its elements, made of whole rows."""

    whole: nn.Parameter  # the model's, a ``DTensor`` with the whole shape
    held: nn.Parameter  # this process's rows, in the same memory; it may have none
    starts: tuple[int, ...]  # the first element of each process's part, then the total number of elements
    place: ParameterRange  # of this process's part


class FsdpModel:
    """A model whose parameters are sharded over all processes of the default group.

    Args:
        model: all of its parameters must train; changed in place. They may be in host memory: each unit is moved to the
            device only while it is sharded.
        units: modules whose weights are gathered together, in the order of the forward pass.
        device: the device that the model will run on.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], device: torch.device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.processes, self.rank = distributed.get_world_size(), distributed.get_rank()
        with _disable_current_modes():  # the mesh consists of real tensors, even in a simulation
            mesh = init_device_mesh(device.type, (self.processes,))
        self.group = mesh.get_group()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        self.units = [*units, model]
        for unit in self.units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        model._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # else the first unit to be gathered is the root
        self.shards: dict[str, ParameterPart] = {}
        for number, (name, whole) in enumerate(trained_parameters(model).items()):
            starts = process_starts(tuple(whole.shape), self.processes)
            with torch.no_grad():
                held = nn.Parameter(local_rows(whole).detach())
            place = ParameterRange(number, starts[self.rank], starts[-1])
            self.shards[name] = ParameterPart(whole, held, starts, place)
        self.held = {name: shard.held for name, shard in self.shards.items() if shard.held.numel()}
        """This process's parts of parameters by name, without empty ones."""
        self.places = [self.shards[name].place for name in self.held]
        """The places of these parts."""
        self.device = device
        model.__dict__[KEY] = self

    def take_gradients(self) -> list[nn.Parameter]:
        """Move the gradients, summed over the processes, to this process's parts; return the whole parameters that have
        a gradient, the same in all processes."""
        found = []
        for shard in self.shards.values():
            gradient, shard.whole.grad = shard.whole.grad, None
            shard.held.grad = None if gradient is None or not shard.held.numel() else local_rows(gradient)
            found += [] if gradient is None else [shard.whole]
        return found

    def norms(self, trained: Iterable[nn.Parameter]) -> list[Tensor]:
        """Compute the fp32 norms of the gradients of what ``take_gradients`` returned, whole, with one exchange."""
        held = {shard.whole: shard.held for shard in self.shards.values()}
        own = [held[parameter].grad for parameter in trained]
        there = [gradient for gradient in own if gradient is not None]
        found = iter(torch._foreach_norm(there, 2, dtype=torch.float32))
        none = torch.zeros((), device=self.device)
        squares = torch.stack([none if gradient is None else next(found) for gradient in own]).square_()
        distributed.all_reduce(squares, group=self.group)
        return list(squares.sqrt_())

    def clip_each(self, trained: Sequence[nn.Parameter], norms: Sequence[Tensor], limit: float) -> None:
        """Clip each parameter's gradient, of which every process holds only a part, from its norm to a limit."""
        held = {shard.whole: shard.held for shard in self.shards.values()}
        for parameter, norm in zip(trained, norms, strict=True):
            gradient = held[parameter].grad
            if gradient is not None:
                gradient.mul_((limit / (norm + CLIP_EPS)).clamp(max=1.0))

    def reshard(self) -> None:
        """Free gathered weights, and forget passes without a backward pass, so that the next one ignores their
        order."""
        for unit in self.units:
            unit.reshard()  # type: ignore[operator]
        self.units[-1].reset_iter_state()  # type: ignore[operator]


def local_rows(tensor: Tensor) -> Tensor:
    """Return this process's rows of a ``DTensor``."""
    from torch.distributed.tensor import DTensor  # takes half a second

    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def process_starts(shape: Sequence[int], processes: int) -> tuple[int, ...]:
    """Return the first element of each process's part of a parameter, then the total number of elements. All parts have
    equally many rows, except the last ones, which may have fewer or none."""
    each, width = -(-shape[0] // processes), math.prod(shape[1:])
    return tuple(min(number * each, shape[0]) * width for number in range(processes + 1))


def fsdp_model(model: nn.Module) -> FsdpModel | None:
    """Return a model's ``FsdpModel``; None if it is not sharded."""
    found: FsdpModel | None = model.__dict__.get(KEY)
    return found


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that this process updates, by name: for a sharded model, its parts."""
    fsdp = fsdp_model(model)
    return trained_parameters(model) if fsdp is None else fsdp.held
