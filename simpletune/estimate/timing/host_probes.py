"""Measure the host's overhead for queueing or running an operation, how copies and products slow each other down, and
what the machine does besides: read and write pictures, draw noise, write files."""

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

from simpletune.engine.memory.recompute import recomputed
from simpletune.estimate.timing.stopwatch import Call, CudaStopwatch, Stopwatch
from simpletune.system.rng import stream

CHAIN = 50
SUSTAINED = 2.0  # seconds
SIDE = 1024  # pixels
WRITTEN = 2**26  # bytes


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
    """The host's seconds for each task that a training step does many times.

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


def core_seconds() -> float:
    """Processor seconds of a fixed loop of Python calls and small operations, by which cores compare as they do in the
    host's part of a step: the least of 50 loops, which take about 10 ms."""
    x = torch.ones(1)

    def once() -> float:
        started = time.thread_time()
        for _ in range(CHAIN):
            _called(x, x, scale=1.0)
        return time.thread_time() - started

    with torch.no_grad():
        return min(once() for _ in range(50))


def _called(x: Tensor, *others: Tensor, **more: float) -> list[Tensor]:
    return [x.mul(each).view(1) for each in others for _ in more]


def _backward_of(call: Callable[[Tensor], Tensor], start: Tensor, in_checkpoint: bool = False) -> Call:
    """A chain and its backward pass; in a checkpoint, the chain runs twice."""

    def chain(y: Tensor) -> Tensor:
        for _ in range(CHAIN):
            y = call(y)
        return y

    def both() -> None:
        result = recomputed(chain, (start,)) if in_checkpoint else chain(start)
        assert isinstance(result, Tensor)
        torch.autograd.grad(result, start)

    return both


def beside_each_other(watch: CudaStopwatch) -> dict[str, float]:
    """How much concurrent products, traffic and copies slow each other down on a CUDA device, as ratios to their times
    alone.

    Returns:
        ``copies_beside_products``: the copies' ratio; ``products_beside_copies``: the products' ratio; likewise for
            traffic within the device; ``copies_both_ways``: the ratio of copies to the device while others go to the
            host; ``products_sustained``: the ratio of products after two seconds of products.
    """
    device, size = watch.device, 2**26
    a = torch.randn(4096, 4096, device=device).bfloat16()
    flat = torch.randn(2**27, device=device)
    host_in, host_out = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, from_there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    copy_in = _repeated(lambda: there.copy_(host_in, non_blocking=True), watch)
    copy_out = _repeated(lambda: host_out.copy_(from_there, non_blocking=True), watch)
    multiply, add = _repeated(lambda: torch.mm(a, a), watch), _repeated(lambda: flat.add_(1), watch)
    found = {}
    for name, work in (("products", multiply), ("traffic", add)):
        found[f"{name}_beside_copies"], found[f"copies_beside_{name}"] = _together(watch, work, copy_in)
    found["copies_both_ways"], _ = _together(watch, copy_in, copy_out)
    found["products_sustained"] = _sustained(watch, multiply)
    return found


def _sustained(watch: CudaStopwatch, work: tuple[Call, int]) -> float:
    """The ratio of a call's seconds after the card has run it for a while and may have reached its power limit."""
    seconds = [_of_streams(watch, [work])[0] for _ in range(int(SUSTAINED / 0.02))]
    return statistics.median(seconds[-10:]) / statistics.median(seconds[:5])


def _repeated(call: Call, watch: CudaStopwatch) -> tuple[Call, int]:
    """Return a call, and how often it fits into 20 ms."""
    return call, max(1, int(0.02 / watch.device_seconds([call], "beside")))


def _together(watch: CudaStopwatch, first: tuple[Call, int], second: tuple[Call, int]) -> tuple[float, float]:
    """The ratios of two concurrent calls' seconds to their seconds alone."""
    alone = [_of_streams(watch, [work])[0] for work in (first, second)]
    beside = _of_streams(watch, [first, second])
    return beside[0] / alone[0], beside[1] / alone[1]


def _of_streams(watch: CudaStopwatch, works: list[tuple[Call, int]]) -> list[float]:
    """Seconds of repeated calls, each on its own stream, started at the same time."""
    streams = [torch.cuda.Stream(watch.device) for _ in works]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in works]
    torch.cuda.synchronize(watch.device)
    most = max(count for _, count in works)
    for queue, (begin, _) in zip(streams, events, strict=True):
        begin.record(queue)
    for number in range(most):
        for (call, count), queue in zip(works, streams, strict=True):
            if number < count:
                with torch.cuda.stream(queue):
                    call()
    for queue, (_, end) in zip(streams, events, strict=True):
        end.record(queue)
    torch.cuda.synchronize(watch.device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def machine_rates() -> dict[str, float]:
    """Seconds per pixel of reading a JPEG (``read_jpeg``) and writing a PNG (``write_png``), per number of noise drawn
    on the host (``noise``), and per byte written to the temporary folder's disk (``write_byte``)."""
    from PIL import Image

    values = (stream(0, "calibrate").random((SIDE // 8, SIDE // 8, 3)) * 255).astype(np.uint8)
    picture = Image.fromarray(values).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=92)

    def read() -> None:
        np.asarray(Image.open(io.BytesIO(jpeg.getvalue())).convert("RGB").resize((SIDE // 2, SIDE // 2)))

    pixels = SIDE**2
    return {
        "read_jpeg": _seconds(read) / pixels,
        "write_png": _seconds(lambda: picture.save(io.BytesIO(), "PNG")) / pixels,
        "noise": _seconds(lambda: stream(0, "noise").standard_normal(2**18, dtype=np.float32)) / 2**18,
        "write_byte": _seconds(_write_file) / WRITTEN,
    }


def _write_file() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\1" * WRITTEN)
        file.flush()
        os.fsync(file.fileno())


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of a call: the least of three."""
    best = float("inf")
    for _ in range(3):
        clock = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - clock)
    return best
