"""Measure the host's overhead for queueing or running an operation, and what the machine does besides: read and write
pictures, write files."""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from simpletune.engine.memory.copy_stream import copy_to_pinned
from simpletune.engine.memory.recompute import recompute
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.estimate.timing.stopwatch import Call, Stopwatch
from simpletune.system.rng import stream

CHAIN = 50
SIDE = 1024  # pixels
WRITTEN = 2**26  # bytes
LOOPS, LAUNCHES = 10, 30  # of a launch's measurement; a card's queue holds more launches than one loop has
COPIED = 2**24  # bytes


class _Through(torch.autograd.Function):
    """A custom function that returns its input."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


def host_seconds(watch: Stopwatch) -> dict[str, float]:
    """Measure the host's seconds for each task that a training step does many times.

    Returns:
        ``operation``: dispatching an operation from Python; ``view``: dispatching one that moves no data; ``recorded``:
            extra time if autograd records it; ``backward``: a node of a backward pass with one operation; ``module``:
            calling a module; ``function``, ``function_backward``: a custom autograd function; ``recomputed``: extra
            time for a recorded operation in a checkpoint, besides running it again.
    """
    # With tensors of one element, so that the device has nothing to do. On a CPU the operation itself is subtracted.
    x = torch.ones(1, device=watch.device)
    w = torch.ones(1, device=watch.device, requires_grad=True)
    same = nn.Identity()

    def seconds(call: Callable[[Tensor], Tensor], start: Tensor = x) -> float:
        def chain() -> Tensor:
            y = start
            for _ in range(CHAIN):
                y = call(y)
            return y

        return watch.host_seconds(chain) / CHAIN

    operation = seconds(lambda y: y * x)
    with torch.enable_grad():
        recorded = seconds(lambda y: y * x, w)
        function = seconds(_Through.apply, w)
        both = watch.host_seconds(_backward_of(lambda y: y * x, w)) / CHAIN
        through = watch.host_seconds(_backward_of(_Through.apply, w)) / CHAIN
        again = watch.host_seconds(_backward_of(lambda y: y * w, w, in_checkpoint=True)) / CHAIN
        plain = watch.host_seconds(_backward_of(lambda y: y * w, w)) / CHAIN
    return {
        "operation": operation,
        "view": seconds(lambda y: y.view(1)),
        "recorded": max(0.0, recorded - operation),
        "backward": max(0.0, both - recorded),
        "module": seconds(same),
        "function": function,
        "function_backward": max(0.0, through - function),
        "recomputed": max(0.0, again - plain - recorded),
    }


def measure_host(device: torch.device) -> HostSpeeds:
    """Measure the machine at hand in under 30 ms, besides a card's first use of a kernel: a core, and with a card a
    launch and the link."""
    core = core_seconds()
    if device.type != "cuda":
        return HostSpeeds(core=core)
    to_device, to_host = link_rates(device)
    return HostSpeeds(core=core, launch=launch_seconds(device), to_device=to_device, to_host=to_host)


def launch_seconds(device: torch.device) -> float:
    """Measure the driver's seconds for a launch, with whatever a virtual machine adds: those of a small operation's
    call on the card, less those of the same call on the processor, whose Python and dispatch are the same."""

    def call_seconds(x: Tensor) -> float:
        found = []
        for _ in range(LOOPS):
            torch.cuda.synchronize(device)
            clock = time.perf_counter()
            for _ in range(LAUNCHES):
                x.mul_(1.0)
            found.append((time.perf_counter() - clock) / LAUNCHES)
        return statistics.median(found)

    on_card, on_host = (call_seconds(torch.ones(1, device=each)) for each in (device, torch.device("cpu")))
    return max(1e-7, on_card - on_host)


def link_rates(device: torch.device) -> tuple[float, float]:
    """Measure the GB/s of copies from pinned memory to the card, and back."""
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    here = copy_to_pinned(torch.empty(COPIED, dtype=torch.uint8))
    to_device = device_seconds(device, lambda: there.copy_(here, non_blocking=True))
    return COPIED / 1e9 / to_device, COPIED / 1e9 / device_seconds(device, lambda: here.copy_(there, non_blocking=True))


def device_seconds(device: torch.device, call: Call) -> float:
    """Measure the card's seconds for a call that is long beside its launch: the better of two."""
    found = []
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        found.append(max(begin.elapsed_time(end) / 1e3, 1e-7))
    return min(found)


def core_seconds() -> float:
    """Measure the processor seconds of a fixed loop of Python calls and small operations, by which cores compare as
    they do in the host's part of a step: the mean of 50 loops, which take about 10 ms. Their least does not see
    programs that share the core's caches: on a machine of 2 cores and a load of 12, steps took 2.44 times their idle
    seconds, the mean said 1.98 times, the median 1.88, the least 1.05."""
    x = torch.ones(1)

    def once() -> float:
        started = time.thread_time()
        for _ in range(CHAIN):
            _call(x, x, scale=1.0)
        return time.thread_time() - started

    with torch.no_grad():
        once()  # finds no code in the caches
        return statistics.fmean(once() for _ in range(50))


def _call(x: Tensor, *others: Tensor, **more: float) -> list[Tensor]:
    return [x.mul(each).view(1) for each in others for _ in more]


def _backward_of(call: Callable[[Tensor], Tensor], start: Tensor, in_checkpoint: bool = False) -> Call:
    """Run a chain and its backward pass; in a checkpoint, the chain runs twice."""

    def chain(y: Tensor) -> Tensor:
        for _ in range(CHAIN):
            y = call(y)
        return y

    def both() -> None:
        result = recompute(chain, (start,)) if in_checkpoint else chain(start)
        assert isinstance(result, Tensor)
        torch.autograd.grad(result, start)

    return both


def machine_rates() -> dict[str, float]:
    """Measure the seconds per pixel of reading a JPEG (``read_jpeg``) and writing a PNG (``write_png``), and per byte
    written to the temporary folder's disk (``write_byte``)."""
    from PIL import Image

    values = (stream(0, "calibrate").random((SIDE // 8, SIDE // 8, 3)) * 255).astype(np.uint8)
    image = Image.fromarray(values).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=92)

    def read() -> None:
        np.asarray(Image.open(io.BytesIO(jpeg.getvalue())).convert("RGB").resize((SIDE // 2, SIDE // 2)))

    pixels = SIDE**2
    return {
        "read_jpeg": _seconds(read) / pixels,
        "write_png": _seconds(lambda: image.save(io.BytesIO(), "PNG")) / pixels,
        "write_byte": _seconds(_write_file) / WRITTEN,
    }


def _write_file() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\1" * WRITTEN)
        file.flush()
        os.fsync(file.fileno())


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call: the least of three."""
    best = float("inf")
    for _ in range(3):
        clock = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - clock)
    return best
