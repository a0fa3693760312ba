"""Simulate one of several equal blocks, and count the others by what it did; only for passes without gradients.

Such a pass leaves nothing behind but its outputs. It allocates as many bytes, and costs host and device as much work,
as an earlier pass of a block with the same modules and options, given tensors of the same layouts on the same device.
Whatever might leave more behind runs in full: passes with gradients, casts that autocast keeps, buffers that are
allocated once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from simpletune.engine.memory import accounting
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.fake_results import PLAIN, CallResult, Key, call_key, made_again, several_of
from simpletune.engine.memory.repeating import PartAllocations
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.engine.tensors import own_tensors, plain_tensors

POSITIONS = {"start", "stop"}  # of a layer's columns in a plan of modulations; their number shows in the shapes
OWN = {"_parameters", "_buffers", "_modules"}
CONTAINERS = {dict, list, tuple, set, frozenset}


class Pass(NamedTuple):
    """What a pass of a block did.

    Args:
        outputs: what it returned.
        allocated: bytes by kind at its peak, from those at its beginning.
        work: what a recorder saw.
    """

    outputs: CallResult
    allocated: Counter[str]
    work: object


def count_equal(blocks: Iterable[nn.Module]) -> None:
    """In an accounting of fake tensors, run one of several equal blocks without gradients, and count the others alike.

    Args:
        blocks: changed in place, before levers wrap their passes.
    """
    for block in blocks:
        block.forward = _counted(block)


def _counted(block: nn.Module) -> Callable[..., object]:
    plain = block.forward

    @functools.wraps(plain)  # checkpointing needs its signature
    def forward(*args: object, **kwargs: object) -> object:
        counting = accounting.active()
        if counting is None or not counting.can_repeat or torch.is_grad_enabled():
            return plain(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key = _key(counting, block, args, kwargs, tensors)
        if key is None:
            return plain(*args, **kwargs)
        known = counting.passes.get(key)
        if isinstance(known, Pass):
            return again(counting, known, tensors)
        with counting.watching() as watched:
            output = plain(*args, **kwargs)
        remember(counting, key, watched, output, tensors)
        return output

    return forward


def remember(
    counting: Accounting, key: Key, watched: PartAllocations, output: object, tensors: Sequence[FakeTensor]
) -> Pass | None:
    """Store what a pass did under its key, and return it; None if it has left more behind than its outputs.

    Args:
        counting: the accounting that watched the pass.
        key: everything that the pass depends on.
        watched: what the pass did.
        output: a tensor, None, or a list or tuple of them.
        tensors: its arguments' tensors.
    """
    outputs = several_of(output, tensors)
    complete = watched.work is not None or counting.repeats is None
    if outputs is None or not complete or watched.left != _new_bytes(output, tensors):
        return None
    known = counting.passes[key] = Pass(outputs, watched.allocated, watched.work)
    return known


def again(counting: Accounting, known: Pass, tensors: Sequence[FakeTensor]) -> object:
    """Count a pass like an earlier one of an equal block, and make its outputs from its arguments' tensors."""
    counting.repeat(known.allocated, known.work)
    made = [made_again(tensors[0].fake_mode, result, tensors) for result in known.outputs.results]
    counting.see(each for each in made if isinstance(each, Tensor))
    return made[0] if known.outputs.wrap is None else known.outputs.wrap(made)


def _new_bytes(output: object, tensors: Sequence[FakeTensor]) -> int:
    """Bytes of the storages that a pass has made for its outputs."""
    outputs = output if isinstance(output, (list, tuple)) else (output,)
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    storages = [each.untyped_storage() for each in outputs if isinstance(each, Tensor)]
    return sum({s._cdata: round_to_block(s.nbytes()) for s in storages if s._cdata not in given}.values())


def _key(
    counting: Accounting, block: nn.Module, args: Sequence[object], kwargs: dict[str, object], tensors: list[FakeTensor]
) -> Key | None:
    """Everything that a pass depends on, as a key; None if it may depend on more.

    Args:
        counting: the accounting that watches the pass.
        block: the block that runs.
        args: its positional arguments; ``kwargs``: its keyword arguments.
        tensors: receives the tensors among the arguments.
    """
    mode = next((each.fake_mode for each in (*args, *kwargs.values()) if isinstance(each, FakeTensor)), None)
    given = None if mode is None else call_key(mode, None, args, kwargs, tensors)
    if given is None:
        return None
    parts: list[object] = [given, *surroundings(counting, tensors)]
    for name, module in block.named_modules():
        parts += (name, type(module))
        parts += (each for each in vars(module).items() if type(each[1]) in PLAIN and each[0] not in POSITIONS)
        parts += (
            (key, plain_value(value))
            for key, value in vars(module).items()
            if type(value) in CONTAINERS and key not in OWN
        )
        for own, tensor in own_tensors(module):
            parts += (own, tensor.requires_grad)
            for plain in plain_tensors(tensor):
                parts += (plain.dtype, plain.shape, plain.stride(), counting.is_on_host(plain))
    return tuple(parts)


def surroundings(counting: Accounting, tensors: Sequence[FakeTensor]) -> Key:
    """What a pass depends on besides its arguments' layouts, such as which share storages or are in host memory."""
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    shared, hosts = tuple(map(storages.index, storages)), tuple(map(counting.is_on_host, tensors))
    return shared, hosts, autocast, counting.kind_and_phase, counting.repeats is None


def plain_value(value: object) -> object:
    """Convert options in lists and dictionaries to something hashable; for anything else return only the type."""
    if isinstance(value, dict):
        return tuple((key, plain_value(each)) for key, each in value.items() if isinstance(key, (str, int)))
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(map(plain_value, value))
    return value if type(value) in PLAIN else type(value)
