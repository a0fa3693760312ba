"""Record a simulated step's work on device and host, in order, with the waits between streams.

A dispatch mode sees every operation (``Accounting``, which passes them on); copies of levers report themselves through
``copy_stream``'s queues. Operations of one phase and module form a section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_pre_hook

from simpletune.engine.memory import copy_stream
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.copy_stream import Copies, CopyEvent
from simpletune.engine.memory.fake import replace_attribute
from simpletune.estimate.timing.sections import COMPUTE, KernelWork, StreamWork
from simpletune.estimate.timing.work import moves_data, tensor_bytes, tensors_in, works_of

SMALL = 4096  # bytes; smaller tensors on the host are counters
PYTHON = ("simpletune", "bitsandbytes")  # namespaces whose operators are written there
TUNED = "int8_product"  # whose kernel Triton's autotuner chooses at each call
BACKWARD = ("backward", "recompute")
"""Phases of the backward pass: its own operations, and the forward passes that it recomputes."""


@cache
def classify_op(op: OpOverload) -> tuple[str, bool, bool]:
    """Return an operation's name without namespace and overload, whether the host runs it, and whether it may move
    data."""
    name = op._schema.name.partition("::")[2]
    return name, op.namespace not in ("profiler", "prim"), moves_data(op)


class Recorder:
    """The recorded sections of a step."""

    def __init__(self, cuda: bool):
        self.cuda = cuda  # whether the step would run on a GPU; a CPU has no queues of copies
        self.sections: list[StreamWork] = []
        self._accounting: Accounting | None = None
        self._known: dict[object, list[KernelWork]] = {}
        self._events = self._queues = 0
        self._share = 1.0
        self._stream = COMPUTE

    def share_work(self, steps: int) -> AbstractContextManager[None]:
        """Count the work in this context as shared by several steps."""
        return replace_attribute(self, "_share", 1 / steps)

    def queues(self) -> AbstractContextManager[None]:
        """Make levers that are built in this context report their copies."""
        return replace_attribute(copy_stream, "_recorded", self._queue) if self.cuda else nullcontext()

    def begin_work(self, batch: Iterable[Tensor]) -> None:
        """Replace the work of making a simulated batch, except a shared window, by a real batch's copy to the
        device."""
        self.sections = [section for section in self.sections if section.share < 1]
        if self.cuda:
            self._section().work[KernelWork("to_device", "bytes", (sum(map(tensor_bytes, batch)),))] += 1

    @contextmanager
    def watching(self, accounting: Accounting) -> Iterator[None]:
        """Record everything that an accounting sees within this context; forget what was recorded before."""
        self._accounting, self.sections = accounting, []
        function = torch.autograd.Function
        original = function.__dict__["apply"]

        def counted(cls: type, *args: object, **kwargs: object) -> object:
            self._host("function")
            if accounting.phases.name not in BACKWARD and torch.is_grad_enabled():
                self._host("function_backward")
            return original.__get__(None, cls)(*args, **kwargs)  # in C from torch 2.15 on, without __func__

        with ExitStack() as stack:
            stack.enter_context(replace_attribute(accounting, "observer", self))
            stack.callback(setattr, function, "apply", original)
            function.apply = classmethod(counted)  # type: ignore[method-assign,assignment]
            handle = register_module_forward_pre_hook(lambda *_: self._host("module"))
            stack.callback(handle.remove)
            yield

    def begin(self) -> tuple[int, Counter[KernelWork], Counter[str]]:
        """Remember what has been recorded so far: the sections, and the last one's work."""
        last = self._section()
        return len(self.sections), Counter(last.work), Counter(last.host)

    def work_since(self, begin: object) -> tuple[Counter[KernelWork], Counter[str]] | None:
        """Return the work since ``begin``; None if it spans more than one section."""
        number, work, host = cast(tuple[int, Counter[KernelWork], Counter[str]], begin)
        last = self.sections[-1]
        if len(self.sections) != number or last.event is not None:
            return None
        return last.work - work, last.host - host

    def repeat(self, seen: object) -> None:
        """Record again the work that ``work_since`` returned."""
        work, host = cast(tuple[Counter[KernelWork], Counter[str]], seen)
        section = self._section()
        section.work.update(work)
        section.host.update(host)

    def see(self, op: OpOverload, args: Sequence[object], kwargs: dict[str, object], output: object) -> None:
        """Record one operation."""
        assert self._accounting is not None
        key = self._accounting.last_key  # of a fake operation: its work is cached by its layouts
        found = None if key is None else self._known.get(key)
        if found is None:
            found = list(works_of(op, args, kwargs, output))
            if key is not None:
                self._known[key] = found
        section, tensors, (name, on_host, moves) = self._section(), tensors_in((args, kwargs)), classify_op(op)
        if on_host and not found:
            section.host["view"] += 1
        elif op.namespace in PYTHON:  # launched from there, in the backward pass too
            section.host["tuned" if name == TUNED else "kernel"] += 1
        elif on_host and section.phase in BACKWARD and not torch.is_grad_enabled():
            section.host["backward"] += 1
        elif on_host:  # also in a recomputation, which runs from Python
            section.host["operation"] += 1
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
                section.host["recorded"] += 1
                section.host["recomputed"] += section.phase in BACKWARD
        if self.cuda and moves and (moved := self._link_copy(name, tensors)):
            section.work[moved] += 1
            if moved.kind != "brought":
                return
            section.work[KernelWork("to_device", "bytes", moved.extents)] += section.work.pop(moved)
        for work in found:  # Counter.update is slow
            section.work[work] += 1

    def _link_copy(self, name: str, tensors: Sequence[Tensor]) -> KernelWork | None:
        """On a GPU, the copy that an operation with tensors in host memory is, or first needs (``brought``)."""
        assert self._accounting is not None
        large = [t for t in tensors if self._accounting.is_on_host(t) and t.nbytes >= SMALL]
        if name == "copy_" and len(tensors) > 1:
            target, source = tensors[0], tensors[1]
            if any(t is target for t in large) != any(t is source for t in large):
                kind = "to_host" if any(t is target for t in large) else "to_device"
                return KernelWork(kind, "bytes", (tensor_bytes(target),))
            return None
        if not large:
            return None
        return KernelWork(
            "to_device" if name in ("_to_copy", "clone") else "brought", "bytes", (sum(map(tensor_bytes, large)),)
        )

    def _host(self, what: str) -> None:
        self._section().host[what] += 1

    def _section(self) -> StreamWork:
        """Return the open section; a new one if phase, module or stream has changed, or something waits for the last
        one."""
        assert self._accounting is not None
        phase, module = self._accounting.phases.place
        last = self.sections[-1] if self.sections else None
        here = (self._stream, phase, module, self._share)
        if last is None or last.event is not None or (last.stream, last.phase, last.module, last.share) != here:
            last = StreamWork(*here)
            self.sections.append(last)
        return last

    def _queue(self) -> RecordedCopies:
        self._queues += 1
        return RecordedCopies(self, f"copies {self._queues}")


class RecordedCopies(Copies):
    """A queue of copies that is recorded instead of run; events are numbers."""

    def __init__(self, recorder: Recorder, stream: str):
        self._recorder, self._stream = recorder, stream

    def mark(self) -> CopyEvent:
        recorder = self._recorder
        section = next((each for each in reversed(recorder.sections) if each.stream == COMPUTE), None)
        return self._end_of(recorder._section() if section is None else section)

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        """Record copies, which start after the given events, as a section of the queue."""
        recorder = self._recorder
        section = self._add(self._stream, 1.0)
        section.after += [event for event in after if event is not None]  # type: ignore[misc]
        before, recorder._stream = recorder._stream, self._stream
        try:
            with torch.no_grad():
                work()
        finally:
            recorder._stream = before
        return self._end_of(section)

    def wait(self, event: CopyEvent) -> None:
        if event is not None:
            self._add(COMPUTE, self._recorder._share).after.append(event)  # type: ignore[arg-type]

    def join(self, event: CopyEvent) -> None:
        if event is not None:
            self._add(COMPUTE, self._recorder._share).host_after.append(event)  # type: ignore[arg-type]

    def _add(self, stream: str, share: float) -> StreamWork:
        """Begin a section."""
        accounting = self._recorder._accounting
        assert accounting is not None
        section = StreamWork(stream, *accounting.phases.place, share=share)
        self._recorder.sections.append(section)
        return section

    def _end_of(self, section: StreamWork) -> CopyEvent:
        """Return the event at the end of a section; a new one if it has none."""
        if section.event is None:
            self._recorder._events += 1
            section.event = self._recorder._events
        return section.event  # type: ignore[return-value]
