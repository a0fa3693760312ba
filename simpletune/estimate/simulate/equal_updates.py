"""Simulate the update of one of several equal parameters, and count the others by what it did.

A model has hundreds of parameters but few shapes. An update leaves nothing behind but the parameter's state, so it
counts like an earlier update with the same layouts of parameter, gradient and state (engine/memory/equal_blocks.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from simpletune.engine.memory import accounting
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.equal_blocks import Pass, again, plain_value, remember, surroundings
from simpletune.engine.memory.fake_results import Key, call_key
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.optim.state import State


class End(NamedTuple):
    """The state that an update leaves.

    Args:
        names: the names of all its values, in order; offloaded states are copied in this order.
        shared: tensors that existed before, which are tables that all states share.
        plain: the values that are not tensors.
    """

    names: list[str]
    shared: list[FakeTensor]
    plain: State


def count_equal_updates(optimizer: torch.optim.Optimizer) -> None:
    """In an accounting of fake tensors, run the update of one of several equal parameters, and count the others alike.

    Args:
        optimizer: changed in place, if it updates parameters one by one and independently of each other.
    """
    if isinstance(optimizer, RoundedOptimizer) and optimizer.independent:
        optimizer.update = _Counted(optimizer)  # type: ignore[method-assign]


class _Counted:
    """Replaces ``RoundedOptimizer.update``."""

    def __init__(self, optimizer: RoundedOptimizer):
        self._optimizer = optimizer
        self._plain: Callable[[nn.Parameter], None] = optimizer.update
        self._ends: dict[Key, End] = {}

    def __call__(self, parameter: nn.Parameter) -> None:
        """Update one parameter."""
        counting, tensors = accounting.active(), list[FakeTensor]()
        key = None if counting is None or not counting.can_repeat else self._key(counting, parameter, tensors)
        if counting is None or key is None:
            del tensors  # an update may free them
            self._plain(parameter)
            return
        known = counting.passes.get(key)
        if not isinstance(known, Pass):
            before = [weakref.ref(tensor) for tensor in tensors]
            del tensors
            self._watch(counting, key, parameter, before)
            return
        end = self._ends[key]
        made = again(counting, known, [*tensors, *end.shared])
        assert isinstance(made, list)
        names = (name for name in end.names if name not in end.plain)
        values = {**dict(zip(names, made, strict=True)), **end.plain}
        self._optimizer.state[parameter].update((each, values[each]) for each in end.names)

    def _watch(
        self, counting: Accounting, key: Key, parameter: nn.Parameter, before: list[weakref.ref[FakeTensor]]
    ) -> None:
        """Run an update, and store what it does.

        Args:
            counting: the accounting that watches it.
            key: everything that the update depends on.
            parameter: the parameter to update.
            before: the tensors given to the update.
        """
        existed = counting.storages()
        with counting.watching() as watched:
            self._plain(parameter)
        assert isinstance(parameter, FakeTensor)
        alive = [each() for each in before]
        given = [parameter if each is None else each for each in alive]  # what was freed is not a result
        values = state_tensors(self._optimizer.state[parameter])
        later = counting.storages()
        shared = [
            value
            for value in values.values()
            if not any(value is tensor for tensor in given)
            and existed.get(place := value.untyped_storage()._cdata) is later.get(place) is not None
        ]
        if remember(counting, key, watched, list(values.values()), [*given, *shared]):
            state = self._optimizer.state[parameter]
            plain = {name: value for name, value in state.items() if name not in values}
            self._ends[key] = End(list(state), shared, plain)

    def _key(self, counting: Accounting, parameter: nn.Parameter, tensors: list[FakeTensor]) -> Key | None:
        """Everything that an update depends on, as a key; None if it may depend on more."""
        state = self._optimizer.state[parameter]
        values = state_tensors(state)
        given = None
        if isinstance(parameter, FakeTensor):
            given = call_key(parameter.fake_mode, None, (parameter, parameter.grad), values, tensors)
        if given is None:
            return None
        plain = tuple((name, plain_value(value)) for name, value in state.items() if name not in values)
        about = (*self._optimizer.kind_of(parameter), torch.is_grad_enabled(), plain)
        return (given, *surroundings(counting, tensors), about)


def state_tensors(state: State) -> dict[str, FakeTensor]:
    """The tensors of a parameter's state."""
    return {name: value for name, value in state.items() if isinstance(value, FakeTensor)}
