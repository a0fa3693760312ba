"""Replay the forward and backward pass of a micro-batch as one CUDA graph, so that no Python runs between its kernels.

A graph repeats the same kernels on the same addresses. So a pass is captured once for each kind of micro-batch (shapes,
and numbers of the host), inputs are copied into tensors that stay, and gradients are added into ``grad`` tensors that
stay. Norms, clipping and the update remain as they are, because Python decides in them.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletune.system.console import say
from simpletune.system.printable import describe_exception
from simpletune.system.startup import pause_collection

if TYPE_CHECKING:
    from torch.cuda.graphs import _POOL_HANDLE

WARM = 2
"""Plain passes of a kind before its capture. They compile kernels, choose algorithms and fill caches, which a capture
must not do, and are steps of the run like all others."""
MOST = 8
"""Graphs at a time."""
NODE_BYTES = 10240
"""Of the driver's memory, for each of a graph's thousands of kernels (github.com/NVIDIA/cccl/issues/3768)."""
OUTSIDE = 4
"""Bytes that must be free beside the graphs' pool, for each byte of trained weights: norms, clipping and updates of all
gradients at once take temporaries."""
SLOW_HOST = 0.85
"""The share of the device's seconds from which the host's seconds to queue a pass limit a step."""

Pass = Callable[[Sequence[Tensor]], Tensor]
"""Computes a loss [] from tensors, and adds its gradients to ``grad``."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor  # []
    queued: float
    """Seconds of the host to queue the pass, without waiting for the device."""
    timed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Around the first replay."""


class Graphs:
    """The graphs of a run's passes, in one pool of memory.

    Whether a pass is replayed does not change its bits, so the two may alternate. The pool keeps the memory of a pass
    between passes: it is freed (``drop``) before anything else needs as much, a plain pass included. A failure of any
    kind ends replaying, not the run: a capture executes nothing, so that nothing must be undone.

    Args:
        device: a CUDA device.
        parameters: those that train.
        measures: replay only if the host limits the step, which the first replay shows.
    """

    def __init__(self, device: torch.device, parameters: Sequence[nn.Parameter], measures: bool = False):
        self.device, self.parameters, self.measures = device, parameters, measures
        self.off: str | None = None
        """Why passes are no longer replayed."""
        self.paused = False
        """Whether passes run plainly for now."""
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()  # the least recently used first
        self._passes: Counter[Hashable] = Counter()  # plain ones by kind, up to WARM
        self._steps = 0
        self._trained: set[nn.Parameter] = set()  # those that had a gradient
        self._sums: dict[nn.Parameter, Tensor] = {}  # their gradients, to which the graphs add
        self._stream = torch.cuda.Stream(device)
        self._pool: _POOL_HANDLE | None = None
        self._announced = False

    def run(self, kind: Hashable, inputs: Sequence[Tensor], compute: Pass) -> Tensor:
        """Run a pass, or replay it; returns its loss [].

        Args:
            kind: everything that ``compute`` depends on besides the values of its inputs and of the model.
            inputs: the micro-batch's tensors.
            compute: the pass, without random numbers.
        """
        if self._graphs:
            self._decide()
        if self.off is not None or self.paused:
            self._release()
            return compute(inputs)
        if self._passes[kind] < WARM or self._steps == 0:  # the first update makes the optimizer's states
            self._release()
            return self._warm(kind, inputs, compute)
        captured = self._graphs.get(kind) or self._capture(kind, inputs, compute)
        if captured is None:
            return compute(inputs)
        self._graphs.move_to_end(kind)
        torch._foreach_copy_(captured.inputs, list(inputs))
        times = self.measures and captured.timed is None
        begin, end = (torch.cuda.Event(enable_timing=True) if times else None for _ in range(2))
        if begin is not None:
            begin.record()
        captured.graph.replay()
        if begin is not None and end is not None:
            end.record()
            captured.timed = begin, end
        return captured.loss.clone()  # the next replay writes it anew

    def end_step(self) -> None:
        """Forget the gradients, in place of ``zero_grad``."""
        self._steps += 1
        self._trained.update(parameter for parameter in self.parameters if parameter.grad is not None)
        for parameter in self.parameters:
            parameter.grad = self._sums.get(parameter)
        if self._sums:
            torch._foreach_zero_(list(self._sums.values()))

    def drop(self) -> None:
        """Free the graphs and their memory, between two steps. They are captured again when they are needed."""
        self._release()
        for parameter in self.parameters:
            parameter.grad = None

    def _release(self) -> None:
        """Free the graphs and their memory, but not the gradients of a step that has begun."""
        self._sums = {}
        if not self._graphs:
            return
        torch.cuda.synchronize(self.device)  # the last replay may still run
        self._graphs.clear()
        self._pool = None
        torch.cuda.empty_cache()

    def _warm(self, kind: Hashable, inputs: Sequence[Tensor], compute: Pass) -> Tensor:
        self._passes[kind] += 1
        before = self._generators()
        loss = compute(inputs)
        if any(not torch.equal(*states) for states in zip(before, self._generators(), strict=True)):
            self._end("a pass draws random numbers (dropout), and a graph would repeat the same ones")
        return loss

    def _generators(self) -> list[Tensor]:
        return [torch.get_rng_state(), torch.cuda.get_rng_state(self.device)]

    def _capture(self, kind: Hashable, inputs: Sequence[Tensor], compute: Pass) -> _Captured | None:
        """Capture a pass; None if that fails."""
        torch.cuda.synchronize(self.device)  # the last replay may still run
        if len(self._graphs) == MOST:
            self._graphs.popitem(last=False)
        before = {parameter: parameter.grad for parameter in self.parameters}
        try:
            captured = self._record(inputs, compute)
            if any(parameter.grad is not self._sums.get(parameter) for parameter in self.parameters):
                raise RuntimeError("a gradient was not added to that of the passes before")
            self._require_room()
        except Exception as error:  # replaying is optional: any failure of it must not end the run
            why = describe_exception(error)
        else:
            self._graphs[kind] = captured
            if not self._announced:
                self._announced = True
                say("graphs  forward and backward pass are replayed as one CUDA graph")
            return captured
        self._end(why)
        for parameter, grad in before.items():
            parameter.grad = grad
        return None

    def _record(self, inputs: Sequence[Tensor], compute: Pass) -> _Captured:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # a plain pass's memory, which a capture could not reuse
        if not self._sums:
            self._sums = {
                parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in self.parameters
                if parameter in self._trained
            }
        for parameter, total in self._sums.items():
            parameter.grad = total
        static = [torch.empty_like(tensor) for tensor in inputs]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A finaliser that waits for the device would end the capture.
        with pause_collection(), torch.cuda.stream(self._stream):
            # Other threads may allocate meanwhile (the next step's batches).
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            began = time.perf_counter()
            try:
                loss = compute(static)
            except BaseException:
                with suppress(RuntimeError):  # that the capture has failed
                    graph.capture_end()
                raise
            queued = time.perf_counter() - began
            graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()  # those of the capture's stream, whose memory stays in the pool
        return _Captured(graph, static, loss, queued)

    def _require_room(self) -> None:
        """Raise RuntimeError if norms, clipping and updates might find too little memory beside the pool."""
        free = torch.cuda.mem_get_info(self.device)[0]
        needed = OUTSIDE * sum(parameter.nbytes for parameter in self.parameters)
        if free < needed:
            mib = 2**20
            raise RuntimeError(f"{free // mib} MiB are free beside it, and the update may take {needed // mib}")

    def _decide(self) -> None:
        """End replaying if the first replay has shown that the host does not limit the step."""
        if not self.measures:
            return
        captured = next(iter(self._graphs.values()))
        if captured.timed is None or not captured.timed[1].query():
            return
        seconds, self.measures = captured.timed[0].elapsed_time(captured.timed[1]) / 1000, False
        times = f"{captured.queued:.3f} s to queue a pass, and the device {seconds:.3f} s to compute it"
        if captured.queued < SLOW_HOST * seconds:
            self.off = f"the host takes {times}"
            say(f"graphs  off: {self.off}")
        else:
            say(f"graphs  on: the host takes {times}")

    def _end(self, why: str) -> None:
        self.off = why
        say(f"graphs  not captured, the run continues step by step: {why}")
        self._release()
