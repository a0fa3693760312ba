"""Remember what operations on fake tensors return, by the layouts of their arguments.

A simulated step runs the same operations on the same shapes for every block. torch's own cache of fake results takes
about a tenth of a millisecond an operation, most of it for cases that do not occur here: symbolic shapes, sparse or
complex tensors, several modes. Everything unusual still goes to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

META = torch.device("meta")
UNUSUAL = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
ABSOLUTE = {torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype}
"""Operations whose result's offset in the storage is not the argument's plus a constant."""
_ABSOLUTE = frozenset(map(id, ABSOLUTE))  # operations have a hash that is slow
LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # their results have values
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
SEQUENCES = {list, tuple, torch.Size}

Key = tuple[object, ...]


class NewTensor(NamedTuple):
    """A result that has its own storage, or is a view of an argument's."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # relative to the argument's
    dtype: torch.dtype
    device: torch.device  # that it pretends to be on
    views: int | None  # the index, among the tensor arguments, of the one whose storage it shares; None: its own
    attributes: dict[str, object]  # of torch's fake tensors, apart from the mode


Result = NewTensor | int | None
"""A tensor to make, the index of the argument that is returned, or None."""


@dataclass(frozen=True, eq=False, slots=True)
class CallResult:
    """What a call returned, one by one; ``wrap`` makes the container of several results, and is None for one."""

    results: tuple[Result, ...]
    wrap: Callable[[list[object]], object] | None


class FakeResults:
    """Results of calls by operation and argument layouts."""

    def __init__(self) -> None:
        self._known: dict[Key, CallResult | None] = {}
        self._ops: dict[int, OpOverload] = {}  # so that a number stays that of its operation
        self.last: CallResult | None = None
        """What the last call returned: one object for all calls with the same key; None if the call has no key."""

    def call(
        self,
        mode: FakeTensorMode,
        op: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        otherwise: Callable[[], object],
    ) -> object:
        """Return what an operation returns in a mode that makes fake tensors; ``otherwise`` runs it by torch's."""
        tensors: list[FakeTensor] = []
        key = call_key(mode, op, args, kwargs, tensors)
        known = None if key is None else self._known.get(key)
        if known is None:
            output = otherwise()
            self.last = None  # of this call, after those within it
            if key is not None and key not in self._known:
                self._ops[id(op)] = op
                usual = isinstance(op, OpOverload) and not UNUSUAL & set(op.tags) and op not in LIFTS
                unchanged = call_key(mode, op, args, kwargs, []) == key
                self._known[key] = remember_several(output, tensors) if usual and unchanged else None
            return output
        self.last = known
        if known.wrap is None:
            return remake(mode, known.results[0], tensors)
        return known.wrap([remake(mode, result, tensors) for result in known.results])


def call_key(
    mode: FakeTensorMode,
    op: OpOverload | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    tensors: list[FakeTensor],
) -> Key | None:
    """Return everything that an operation's result depends on, as a key; None if it may depend on more, such as a
    tensor of another mode. ``tensors`` receives those among the arguments."""
    if torch.is_inference_mode_enabled():
        return None
    parts: list[object] = [id(op), torch.get_default_dtype()]
    if not _add(parts, args, mode, tensors):
        return None
    if kwargs:
        parts.extend(kwargs)
        if not _add(parts, kwargs.values(), mode, tensors):
            return None
    if id(op) in _ABSOLUTE:
        parts += (tensor.storage_offset() for tensor in tensors)
    return tuple(parts)


def _add(parts: list[object], values: Iterable[object], mode: FakeTensorMode, tensors: list[FakeTensor]) -> bool:
    """Add arguments to a key; False if one is unusual."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            assert isinstance(value, FakeTensor)
            if value.constant is not None or value.fake_mode is not mode:
                return False
            if value.layout is not torch.strided or value.dtype.is_complex:
                return False
            parts += (value.dtype, value.shape, value.stride(), value._fake_device)
            tensors.append(value)
            continue
        if kind in PLAIN:
            parts += (kind, value)  # 1, 1.0 and True are equal
            continue
        if kind not in SEQUENCES:
            return False
        assert isinstance(value, (list, tuple))
        parts += (kind, len(value))
        if not _add(parts, value, mode, tensors):
            return False
    return True


def remember_several(output: object, tensors: Sequence[FakeTensor]) -> CallResult | None:
    """Return what to remember of a tensor, None, or a list or tuple of them; None if it is unusual."""
    several = isinstance(output, (list, tuple))
    found = [storable_result(each, tensors) for each in (output if several else [output])]  # type: ignore[attr-defined]
    new = [each for each in (output if several else [output]) if isinstance(each, Tensor)]  # type: ignore[attr-defined]
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    storages = [each.untyped_storage()._cdata for each in new if each.untyped_storage()._cdata not in given]
    if any(isinstance(each, str) for each in found) or len(set(storages)) < len(storages):
        return None
    results = tuple(each for each in found if not isinstance(each, str))
    return CallResult(results, (list if isinstance(output, list) else tuple) if several else None)


def storable_result(value: object, tensors: Sequence[FakeTensor]) -> Result | str:
    """Return what to remember of one result; a reason if it is unusual."""
    if value is None:
        return None
    if type(value) is not FakeTensor:
        return "no fake tensor"
    for number, tensor in enumerate(tensors):
        if tensor is value:
            return number
    shared = value.untyped_storage()._cdata
    views = next((number for number, each in enumerate(tensors) if each.untyped_storage()._cdata == shared), None)
    attributes = {name: each for name, each in vars(value).items() if name != "fake_mode"}
    if value.requires_grad or any(each is not None for name, each in attributes.items() if name != "_fake_device"):
        return "more than a layout"
    offset = int(value.storage_offset()) - (0 if views is None else int(tensors[views].storage_offset()))
    if views is None:
        with torch._C._DisableTorchDispatch():
            whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        if offset or whole.untyped_storage().nbytes() != value.untyped_storage().nbytes():
            return "a part of a storage"
    return NewTensor(value.shape, value.stride(), offset, value.dtype, value._fake_device, views, attributes)


def remake(mode: FakeTensorMode, result: Result, tensors: Sequence[FakeTensor]) -> object:
    """Make a remembered result for other arguments of the same layouts."""
    if result is None:
        return None
    if isinstance(result, int):
        return tensors[result]
    shape, stride, offset, dtype, device, views, attributes = result
    with torch._C._DisableTorchDispatch():
        if views is None:
            plain = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        else:
            viewed = tensors[views]
            offset += int(viewed.storage_offset())
            plain = torch.empty_strided((0,), (1,), dtype=dtype, device=META)
            plain.set_(viewed.untyped_storage(), offset, shape, stride)
        fake = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
    own = fake.__dict__
    own.update(attributes)
    own["fake_mode"] = mode
    return fake
