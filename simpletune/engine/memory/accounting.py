"""Account for live tensor bytes by kind, and find the peak and where it occurs. Needs no GPU.

A dispatch mode sees every operation, including those of the backward pass, of recomputation and of autograd Functions.
It counts each new storage until the storage is freed, holding only a weak reference. Sizes are rounded up to 512 bytes
as the CUDA caching allocator does (torch's CUDACachingAllocator.cpp, kMinBlockSize). Real and fake tensors count alike.

It cannot see what a kernel allocates internally; kernel_workspace.py adds that, cuda_libraries.py what cuBLAS takes.

torch's own tracker (torch.distributed._tools.mem_tracker.MemTracker, 2.13) does not work here: it raises for frozen
parameters and at a second micro-batch, has neither adapter nor plan among its kinds, and counts host memory.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from simpletune.engine.memory import fake
from simpletune.engine.memory.snapshot import (
    HOST,
    NOT_ON_DEVICE,
    MemorySnapshot,
    OutOfMemory,
    require_known,
    round_to_block,
)
from simpletune.engine.tensors import is_wrapper, plain_tensors
from simpletune.system.phases import phase_name

ACTIVATION_PHASES = ("noise", "forward", "loss", "backward")

DEVICE = torch.ops.prim.device.default
_PRODUCTS = {
    id(getattr(torch.ops.aten, name).default)
    for name in ("mm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot")
}
"""The operations that cuBLAS computes; addmm is cuBLASLt's."""
_RANGES = {
    id(torch.ops.profiler._record_function_enter_new.default): "enter",
    id(torch.ops.profiler._record_function_exit._RecordFunction): "exit",
}

Temporaries = Mapping[OpOverload, Callable[..., int]]
"""Functions from an operation's arguments to the bytes that its kernel allocates and frees within the call."""
Layouts = Callable[[OpOverload, Sequence[Any], Mapping[str, Any], object], object]
"""Functions from an operation, its positional and named arguments and its result to that result as another device's
kernel lays it out."""


class Observer(Protocol):
    """An observer of every operation, which can count a part of what it saw again."""

    def see(self, op: OpOverload, args: Sequence[object], kwargs: dict[str, object], output: object) -> None:
        """See one operation."""

    def begin(self) -> object:
        """Remember what has been seen so far."""

    def work_since(self, begin: object) -> object:
        """Return what has been seen since ``begin``; None if it cannot be counted again."""

    def repeat(self, seen: object) -> None:
        """Count what ``work_since`` returned again."""


class Peaks:
    """The largest snapshots."""

    def __init__(self) -> None:
        self._largest = MemorySnapshot(in_products=0)
        self._by_phase: dict[str, MemorySnapshot] = {}
        self._in_products: dict[str, int] = {}

    @property
    def largest(self) -> MemorySnapshot:
        """The largest of all phases; the last of equal ones, because optimizer states then have their kind."""
        return replace(self._largest, in_products=max(self._in_products.values(), default=0))

    @property
    def by_phase(self) -> dict[str, MemorySnapshot]:
        """The largest of each phase."""
        most = self._in_products
        return {name: replace(each, in_products=most.get(name, 0)) for name, each in self._by_phase.items()}

    def most(self, phase: str) -> int:
        """Return the bytes of a phase's largest snapshot; -1 if there is none."""
        return self._by_phase[phase].bytes if phase in self._by_phase else -1

    def add(self, snapshot: MemorySnapshot) -> None:
        """Keep a snapshot if none was larger."""
        before = self._by_phase.get(snapshot.phase, snapshot)
        self._by_phase[snapshot.phase] = max(snapshot, before, key=lambda each: each.bytes)
        self._largest = max(snapshot, self._largest, key=lambda each: each.bytes)

    def add_product(self, phase: str, live: int) -> None:
        """Keep the live bytes of a product."""
        if live > self._in_products.get(phase, 0):
            self._in_products[phase] = live

    def add_all(self, other: Peaks) -> None:
        """Keep what another has."""
        for snapshot in other._by_phase.values():
            self.add(snapshot)
        if other._by_phase:
            self.add(other._largest)  # again: of equal ones in two phases it is the last
        for phase, live in other._in_products.items():
            self.add_product(phase, live)


class PhaseTracker:
    """The phase and the module that run, by which an accounting names them."""

    def __init__(self) -> None:
        self.module = ""
        """The watched module that runs; empty if none does."""
        self.visit = 0
        """How many phases have been entered so far."""
        self._phases: list[tuple[str, int]] = []
        self._inside = 0  # number of watched modules in their forward pass, and of recomputations

    @property
    def phase(self) -> str:
        """The running phase; empty outside of all."""
        return self._phases[-1][0] if self._phases else ""

    @property
    def name(self) -> str:
        """The running phase, or ``recompute`` for a recomputation in the backward pass."""
        phase = self.phase
        return "recompute" if phase == "backward" and self._inside else phase

    @property
    def place(self) -> tuple[str, str]:
        """The running phase, as ``name``, and module."""
        return self.name, self.module

    def enter(self, range_name: str) -> None:
        """Enter a phase. Foreign ranges, such as torch's ``Optimizer.step``, belong to the enclosing phase."""
        name = phase_name(range_name)
        if name is None:
            self._phases.append((self.phase, 0))
            return
        self.visit += 1
        self.module = ""
        self._phases.append((name, self.visit))

    def leave(self) -> tuple[str, int]:
        """Leave a phase; return it and the number of its visit, 0 for a foreign range."""
        left, visit = self._phases.pop()
        if visit:
            self.module = ""
        return left, visit

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Count what a backward pass runs in this context as recomputation."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def watch_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> list[RemovableHandle]:
        """Track the running module; the handles remove the hooks."""
        return [handle for name, module in modules for handle in self._watch(name, module)]

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def begin_forward(*_: object) -> None:
            self.module = name
            self._inside += 1

        def begin_backward(_: Tensor) -> None:  # its outputs' gradients have arrived
            self.module = name

        def end_forward(_module: nn.Module, _inputs: object, output: object) -> None:
            self._inside -= 1
            self.module = name if self.phase == "backward" else ""  # its backward pass follows a recomputation
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(begin_backward)

        # A checkpoint ends the recomputation with an exception as soon as it has everything it needs.
        end = module.register_forward_hook(end_forward, always_call=True)
        return [module.register_forward_pre_hook(begin_forward), end]


@dataclass
class _Storage:
    """A live storage."""

    bytes: int
    kind: str
    visit: int  # the visit to a phase during which it was allocated
    alive: weakref.ref


class Accounting(TorchDispatchMode):
    """Counts live tensor bytes while the context is active; with ``keep`` it records every snapshot, not only the
    largest."""

    def __init__(self, temporaries: Temporaries | None = None, keep: bool = False, layouts: Layouts | None = None):
        super().__init__()
        self.phases = PhaseTracker()
        """Where the step is."""
        self._layouts = layouts
        self._temporaries = {id(op): size for op, size in (temporaries or {}).items()}  # their own hash is slow
        self._storages: dict[int, _Storage] = {}
        self._bytes: Counter[str] = Counter()
        self._total = 0
        self._kinds: list[str] = []
        self._peaks = Peaks()
        self.snapshots: list[MemorySnapshot] | None = [] if keep else None
        """All snapshots since the last ``forget_snapshots``, in order."""
        self.last_key: object = None
        """Everything that the last operation's result and work depend on; None if it may depend on more."""
        self.observer: Observer | None = None
        """Sees every operation."""
        self.limit: int | None = None
        """The number of live bytes above which ``OutOfMemory`` is raised; None: no limit."""

    def __enter__(self) -> Accounting:
        _ACTIVE.append(self)
        self._resize = original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            original(storage, size)
            if storage._cdata in self._storages:
                self._see(storage)
                self.look()
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # dispatch does not see it
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        _ACTIVE.remove(self)
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in this context, so dynamo need not be disabled around every operation."""
        return False

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: dict | None = None
    ) -> object:
        """Run one operation and count the storages of its outputs."""
        if op is DEVICE:
            return args[0]._fake_device  # type: ignore[attr-defined]  # a shortcut: autograd asks for it constantly
        if any(map(is_wrapper, types)):
            return NotImplemented  # a wrapper, such as quanto's weight, unwraps itself; its parts are dispatched again
        name = _RANGES.get(id(op), "")
        if name == "exit":
            left, visit = self.phases.leave()
            if visit and left == "optimizer":  # what was allocated in this phase and outlives it is optimizer state
                for storage in self._storages.values():
                    if storage.visit >= visit and storage.kind == "workspace":
                        self._move(storage, "optimizer")
        mode = fake.active_mode()
        kwargs = kwargs or {}
        if mode is None:
            output, self.last_key = op(*args, **kwargs), None
        else:  # past the dispatcher if its result is known
            output = fake.RESULTS.call(mode, op, args, kwargs, lambda: op(*args, **kwargs))
            self.last_key = fake.RESULTS.last
        if self._layouts is not None:
            output = self._layouts(op, args, kwargs, output)
        if self.observer is not None:
            self.observer.see(op, args, kwargs, output)
        if name == "enter":
            self.phases.enter(str(args[0]))
        grown = False
        for leaf in output if isinstance(output, (tuple, list)) else (output,):
            if not isinstance(leaf, Tensor):
                continue
            device = leaf.__dict__.get("_fake_device") if type(leaf) is FakeTensor else None  # not by the dispatcher
            if (device or leaf.device).type != "meta":  # meta tensors take no memory
                grown |= self._see(leaf.untyped_storage())
        if id(op) in _PRODUCTS:
            self._peaks.add_product(self.phases.name, self._total)
        temporary = self._temporaries.get(id(op))
        if temporary is not None:
            self.look({"workspace": round_to_block(temporary(*args, **kwargs))})
        elif grown:
            self.look()
        return output

    @property
    def peak(self) -> MemorySnapshot:
        """The largest snapshot so far."""
        return self._peaks.largest

    @property
    def peaks(self) -> dict[str, MemorySnapshot]:
        """The largest snapshot of each phase."""
        return self._peaks.by_phase

    @property
    def current(self) -> MemorySnapshot:
        """A snapshot of the live bytes."""
        by_kind = {kind: size for kind, size in self._bytes.items() if size and kind not in NOT_ON_DEVICE}
        return MemorySnapshot(self._total, by_kind, self.phases.name, self.phases.module, 0)

    def forget_peak(self) -> None:
        """Reset the peaks, at the start of another stage."""
        self._peaks = Peaks()
        self.look()

    def forget_snapshots(self) -> None:
        """Discard the recorded snapshots, at the start of another step."""
        if self.snapshots is not None:
            self.snapshots = [self.current]

    @contextmanager
    def separate_peaks(self) -> Iterator[Peaks]:
        """Find the largest snapshots within this context alone; afterwards they count like all others."""
        whole = self._peaks
        found = self._peaks = Peaks()
        try:
            yield found
        finally:
            self._peaks = whole
            whole.add_all(found)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is registered as host memory, or as a file's pages."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.kind in NOT_ON_DEVICE

    def storages(self) -> dict[int, object]:
        """Return each live storage by its address; a new object when another storage takes the address."""
        return dict(self._storages)

    @property
    def host_bytes(self) -> int:
        """The live bytes registered as host memory."""
        return self._bytes[HOST]

    def register(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Assign a kind, one of ``KINDS`` or ``NOT_ON_DEVICE``, to tensors, whether or not they have been counted
        before. Wrapper subclasses count by their inner tensors."""
        require_known(kind)
        for tensor in tensors:
            for plain in plain_tensors(tensor) if tensor is not None else ():
                storage = plain.untyped_storage()
                self._see(storage)
                self._move(self._storages[storage._cdata], kind)
        self.look()

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that no operation returned, without looking for a peak."""
        for tensor in tensors:
            self._see(tensor.untyped_storage())

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
        """Count the parameters' ``.grad`` as gradients; the handles remove the hooks."""

        def mark(parameter: Tensor) -> None:
            self.register([parameter.grad], "gradients")

        return [parameter.register_post_accumulate_grad_hook(mark) for parameter in parameters]

    @contextmanager
    def allocating(self, kind: str) -> Iterator[None]:
        """Assign a kind to everything allocated in this context."""
        require_known(kind)
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._kinds.pop()

    @property
    def new_kind(self) -> str:
        """The kind of new allocations."""
        if self._kinds:
            return self._kinds[-1]
        return "activations" if self.phases.phase in ACTIVATION_PHASES else "workspace"

    def _see(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage, and return whether the total has grown."""
        key, size = storage._cdata, round_to_block(storage.nbytes())
        known = self._storages.get(key)
        if known is not None:
            grown, known.bytes = size - known.bytes, size
            if grown:
                self._add(known.kind, grown)
            return grown > 0
        alive = weakref.ref(storage, lambda _: self._die(key))
        self._storages[key] = _Storage(size, self.new_kind, self.phases.visit, alive)
        self._add(self._storages[key].kind, size)
        return size > 0

    def _move(self, storage: _Storage, kind: str) -> None:
        self._add(storage.kind, -storage.bytes)
        storage.kind = kind
        self._add(kind, storage.bytes)

    def _die(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._add(storage.kind, -storage.bytes)

    def _add(self, kind: str, size: int) -> None:
        self._bytes[kind] += size
        if kind not in NOT_ON_DEVICE:
            self._total += size

    def look(self, more: Mapping[str, int] | None = None) -> None:
        """Record a snapshot if it is the largest so far; ``more`` counts beside the live bytes, by kind: what a kernel
        allocates and frees. Raises OutOfMemory above the limit."""
        total = self._total + sum(more.values()) if more else self._total
        if self.limit is not None and total > self.limit:
            raise OutOfMemory(total)
        name, peaks = self.phases.name, self._peaks
        larger = total >= peaks.most(name)
        if not larger and self.snapshots is None:
            return
        sizes = self._bytes if not more else {**self._bytes, **{k: self._bytes[k] + size for k, size in more.items()}}
        by_kind = {kind: size for kind, size in sizes.items() if size and kind not in NOT_ON_DEVICE}
        snapshot = MemorySnapshot(total, by_kind, name, self.phases.module)
        if self.snapshots is not None:
            self.snapshots.append(snapshot)
        if larger:
            peaks.add(snapshot)


_ACTIVE: list[Accounting] = []


def active_accounting() -> Accounting | None:
    """Return the active accounting, if there is one."""
    return _ACTIVE[-1] if _ACTIVE else None


def register(tensors: Iterable[Tensor | None], kind: str) -> None:
    """Register tensors with the active accounting, if there is one, as its ``register`` does."""
    for accounting in _ACTIVE[-1:]:
        accounting.register(tensors, kind)


def allocating(kind: str) -> AbstractContextManager[None]:
    """Assign a kind to everything allocated in this context, if an accounting is active."""
    return _ACTIVE[-1].allocating(kind) if _ACTIVE else nullcontext()


def recomputing() -> AbstractContextManager[None]:
    """Count what runs in this context as recomputation, if an accounting is active."""
    return _ACTIVE[-1].phases.recomputing() if _ACTIVE else nullcontext()
