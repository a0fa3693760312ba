"""Simulate the update of one of several equal parameters, and count the others by what it did.

A model has hundreds of parameters but few shapes. An update leaves nothing behind but the parameter's state. It
allocates as many bytes, and costs host and device as much work, as an earlier update with the same layouts of
parameter, gradient and state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from simpletune.engine.memory import accounting
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.fake_results import PLAIN, CallResult, Key, call_key, remake, remember_several
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.optim.state import State


class Update(NamedTuple):
    """What an update did."""

    outputs: CallResult
    """The tensors of the state that it left."""
    allocated: Mapping[str, int]
    """Bytes by kind at its peak, from those at its beginning."""
    work: object
    """What the accounting's observer saw."""
    names: list[str]
    """Of all the state's values, in order; offloaded states are copied in this order."""
    shared: list[FakeTensor]
    """Tensors that existed before, which are tables that all states share."""
    plain: State
    """The values that are not tensors."""


def count_equal_updates(optimizer: torch.optim.Optimizer) -> None:
    """Run the update of one of several equal parameters, in an accounting of fake tensors, and count the others alike;
    changes an optimizer that updates parameters one by one and independently of each other."""
    if isinstance(optimizer, RoundedOptimizer) and optimizer.independent:
        optimizer.update = _UpdateCounter(optimizer)  # type: ignore[method-assign]


class _UpdateCounter:
    """A replacement of ``RoundedOptimizer.update``."""

    def __init__(self, optimizer: RoundedOptimizer):
        self._optimizer = optimizer
        self._plain: Callable[[nn.Parameter], None] = optimizer.update
        self._known: dict[Key, Update] = {}

    def __call__(self, parameter: nn.Parameter) -> None:
        """Update one parameter."""
        counting, tensors = accounting.active_accounting(), list[FakeTensor]()
        key = None
        if counting is not None and counting.snapshots is None:
            key = self._key(counting, parameter, tensors)
        if counting is None or key is None:
            del tensors  # an update may free them
            self._plain(parameter)
            return
        known = self._known.get(key)
        if known is not None:
            self._repeat(counting, known, parameter, [*tensors, *known.shared])
            return
        before = [weakref.ref(tensor) for tensor in tensors]
        del tensors
        found = self._watch(counting, parameter, before)
        if found is not None:
            self._known[key] = found

    def _repeat(
        self, counting: Accounting, known: Update, parameter: nn.Parameter, tensors: Sequence[FakeTensor]
    ) -> None:
        """Count an update like an earlier one, and make the parameter's state from the tensors given to it."""
        if known.allocated:
            counting.look(known.allocated)
        if counting.observer is not None:
            counting.observer.repeat(known.work)
        made = [remake(tensors[0].fake_mode, result, tensors) for result in known.outputs.results]
        counting.see(each for each in made if isinstance(each, Tensor))
        names = (name for name in known.names if name not in known.plain)
        values = {**dict(zip(names, made, strict=True)), **known.plain}
        self._optimizer.state[parameter].update((each, values[each]) for each in known.names)

    def _watch(
        self, counting: Accounting, parameter: nn.Parameter, before: list[weakref.ref[FakeTensor]]
    ) -> Update | None:
        """Run an update of a parameter, given the tensors before it; return what it did, or None if it has left more
        than the state."""
        existed, begin, on_host = counting.storages(), counting.current, counting.host_bytes
        seen = None if counting.observer is None else counting.observer.begin()
        with counting.separate_peaks() as peaks:
            self._plain(parameter)
        end, top = counting.current, peaks.largest
        work = None if counting.observer is None else counting.observer.work_since(seen)
        assert isinstance(parameter, FakeTensor)
        alive = [each() for each in before]
        given = [parameter if each is None else each for each in alive]  # what was freed is not a result
        state, later = self._optimizer.state[parameter], counting.storages()
        values = _tensors(state)
        shared = [
            value
            for value in values.values()
            if not any(value is tensor for tensor in given)
            and existed.get(place := value.untyped_storage()._cdata) is later.get(place) is not None
        ]
        results, given = list(values.values()), [*given, *shared]
        outputs = remember_several(results, given)
        left = end.bytes - begin.bytes + counting.host_bytes - on_host
        old = {tensor.untyped_storage()._cdata for tensor in given}
        storages = [each.untyped_storage() for each in results]
        made = {s._cdata: round_to_block(s.nbytes()) for s in storages if s._cdata not in old}
        unseen = counting.observer is not None and work is None
        if outputs is None or unseen or left != sum(made.values()):
            return None
        kinds = {*top.by_kind, *begin.by_kind} if top.bytes else ()
        allocated = {kind: top.by_kind.get(kind, 0) - begin.by_kind.get(kind, 0) for kind in kinds}
        plain = {name: value for name, value in state.items() if name not in values}
        return Update(outputs, allocated, work, list(state), shared, plain)

    def _key(self, counting: Accounting, parameter: nn.Parameter, tensors: list[FakeTensor]) -> Key | None:
        """Return everything that an update depends on, as a key; None if it may depend on more."""
        state = self._optimizer.state[parameter]
        values = _tensors(state)
        given = None
        if isinstance(parameter, FakeTensor):
            given = call_key(parameter.fake_mode, None, (parameter, parameter.grad), values, tensors)
        if given is None:
            return None
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        return (
            given,
            tuple(map(storages.index, storages)),  # which share one
            tuple(map(counting.is_on_host, tensors)),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            (counting.new_kind, counting.phases.name, counting.observer is None),
            (*self._optimizer.kind_of(parameter), torch.is_grad_enabled()),
            tuple((name, _plain_value(value)) for name, value in state.items() if name not in values),
        )


def _plain_value(value: object) -> object:
    """Convert options in lists and dictionaries to something hashable; for anything else return only the type."""
    if isinstance(value, dict):
        return tuple((key, _plain_value(each)) for key, each in value.items() if isinstance(key, (str, int)))
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(map(_plain_value, value))
    return value if type(value) in PLAIN else type(value)


def _tensors(state: State) -> dict[str, FakeTensor]:
    """Return the tensors of a parameter's state."""
    return {name: value for name, value in state.items() if isinstance(value, FakeTensor)}
