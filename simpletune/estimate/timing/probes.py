"""What ``simpletune doctor --calibrate`` times: products, convolutions, attention, traffic, int8 and nf4.

Shapes: m rows (samples x tokens), n outputs, k the length of the sum. A linear layer computes y = x W^T ("tn" below);
its backward pass computes "nn" products (the gradient of x) and "nt" products (the gradient of W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from simpletune.engine.quant.int8_products import dequantise_weight, int8_problem, int8_product, int8_rows
from simpletune.estimate.timing.stopwatch import Call

Axes = dict[str, list[int]]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = 64  # width of rows in "strided": a head's
ROW = 1024  # width of rows that norms work on
BLOCK = 64  # nf4's weights per scale


@dataclass(frozen=True)
class TimingProbe:
    """A kind of operation to time at the points of a grid."""

    name: str
    """The grid's."""
    axes: Axes
    """Extents by name."""
    build: Callable[..., Call]
    """Makes the operation of a point from its extents, with its own tensors on a device."""
    size: Callable[..., int]
    """Bytes of its operands and results, roughly, from the extents."""


def probes_of(device: torch.device) -> Iterator[TimingProbe]:
    """Yield everything to time on a device, the most informative first."""
    int8 = int8_problem(device) is None
    for name in ("bf16", "fp32"):
        yield from probes_of_type(name, device)
    if device.type == "cuda":
        yield from copies(device)
    if int8:
        yield from int8_products(device)
    if device.type == "cuda":
        yield from probes_of_type("fp16", device)  # on a CPU, about as slow as fp32


def probes_of_type(name: str, device: torch.device) -> Iterator[TimingProbe]:
    """Yield the operations with floating-point operands of one type."""
    dtype = TYPES[name]
    yield from traffic(name, dtype, device)
    yield from products(name, dtype, device)
    yield from attentions(name, dtype, device)
    yield from convolutions(name, dtype, device)


def products(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[TimingProbe]:
    """Yield products in one type and their other layouts, as ``product.TYPE`` and ``product_LAYOUT.TYPE``."""
    cuda = device.type == "cuda"
    rows = [1, 16, 64, 256, 1024, 4096, *([16384] if cuda else [])]
    widths = [16, 64, 256, 640, 1536, 6144] if cuda else [16, 64, 256, 1024, 3072]
    coarse = [64, 512, 4096] if cuda else [16, 128, 1024]

    def matrix(rows: int, columns: int) -> Tensor:
        return random_tensor((rows, columns), dtype, device)

    def build(layout: str, m: int, n: int, k: int) -> Call:
        a = matrix(k, m).t() if layout == "nt" else matrix(m, k)
        return partial(torch.mm, a, matrix(n, k).t() if layout == "tn" else matrix(k, n))

    def size(m: int, n: int, k: int) -> int:
        return dtype.itemsize * (m * k + n * k + m * n)

    axes = {"rows": rows, "outputs": widths, "sum": widths}
    yield TimingProbe(f"product.{name}", axes, partial(build, "tn"), size)
    small = {"rows": coarse, "outputs": coarse, "sum": coarse}
    for layout in ("tn", "nn", "nt"):
        yield TimingProbe(f"product_{layout}.{name}", small, partial(build, layout), size)


def attentions(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[TimingProbe]:
    """Yield fused attention, forward and forward with backward, as ``attention.TYPE`` and ``attention_both.TYPE``, and
    with a mask of its keys, as ``attention_masked.TYPE`` and ``attention_masked_both.TYPE``."""
    cuda = device.type == "cuda"
    tokens = [64, 512, 4096] if cuda else [16, 128, 1024]
    axes = {"heads": [2, 24] if cuda else [1, 8], "queries": tokens, "keys": tokens}
    axes["width"] = [64, 128] if cuda else [16, 64]

    def build(masked: bool, backward: bool, heads: int, queries: int, keys: int, width: int) -> Call:
        shapes = [(1, heads, tokens, width) for tokens in (queries, keys, keys)]
        q, k, v = (random_tensor(shape, dtype, device).requires_grad_(backward) for shape in shapes)
        mask = torch.zeros(1, 1, 1, keys, dtype=dtype, device=device) if masked else None  # what torch makes of bool
        if not backward:
            return partial(F.scaled_dot_product_attention, q, k, v, mask)
        grad = torch.ones_like(q)

        def both() -> None:
            with torch.enable_grad():
                torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask), (q, k, v), grad)

        return both

    def size(heads: int, queries: int, keys: int, width: int) -> int:
        return 2 * heads * (queries + keys) * width * dtype.itemsize

    for masked in (False, True):
        kind = "attention_masked" if masked else "attention"
        yield TimingProbe(f"{kind}.{name}", axes, partial(build, masked, False), size)
        yield TimingProbe(f"{kind}_both.{name}", axes, partial(build, masked, True), size)


def convolutions(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[TimingProbe]:
    """Yield 3 x 3 convolutions and their two gradients, as ``convolution.TYPE`` and so on."""
    cuda = device.type == "cuda"
    channels = [4, 128, 640] if cuda else [4, 32, 128]
    pixels = [64, 1024, 4096, 16384, 262144] if cuda else [64, 1024, 4096]
    axes = {"pixels": pixels, "inputs": channels, "outputs": channels}

    def build(mask: list[bool] | None, pixels: int, inputs: int, outputs: int) -> Call:
        side = math.isqrt(pixels)
        weight = random_tensor((outputs, inputs, 3, 3), dtype, device)
        x = random_tensor((1, inputs, side, side), dtype, device)
        if mask is None:
            return partial(F.conv2d, x, weight, padding=1)
        grad, one, zero = random_tensor((1, outputs, side, side), dtype, device), [1, 1], [0, 0]
        backward = torch.ops.aten.convolution_backward.default
        return partial(backward, grad, x, weight, None, one, one, one, False, zero, 1, mask)

    def size(pixels: int, inputs: int, outputs: int) -> int:
        return dtype.itemsize * (pixels * (inputs + outputs) + 9 * inputs * outputs)

    yield TimingProbe(f"convolution.{name}", axes, partial(build, None), size)
    few = {**axes, "pixels": [size for size in pixels if size <= 16384]}
    yield TimingProbe(f"convolution_input.{name}", few, partial(build, [True, False, False]), size)
    yield TimingProbe(f"convolution_weight.{name}", few, partial(build, [False, True, False]), size)


def traffic(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[TimingProbe]:
    """Yield memory-bound operations, by the bytes that they read and write, as ``KIND.TYPE``."""
    cuda = device.type == "cuda"
    size = dtype.itemsize
    axes = {"bytes": [2**power for power in ((12, 16, 20, 24, 28, 30) if cuda else (12, 16, 20, 24))]}

    def probe(kind: str, moved: float, build: Callable[[int], Call]) -> TimingProbe:
        """Make a probe. ``moved``: bytes per element; ``build`` gets the number of elements, a multiple of ROW if
        possible."""

        def at(total: int) -> Call:
            return build(max(ROW, int(total / moved) // ROW * ROW))

        return TimingProbe(f"{kind}.{name}", axes, at, int)

    def flat(count: int) -> Tensor:
        return random_tensor((count,), dtype, device)

    def rows(count: int) -> Tensor:
        return random_tensor((count // ROW, ROW), dtype, device)

    def with_(make: Callable[[int], Tensor], call: Callable[[Tensor], object]) -> Callable[[int], Call]:
        return lambda count: partial(call, make(count))

    weight = torch.ones(ROW, device=device, dtype=dtype)
    ops = torch.ops.aten
    yield probe("add", 3 * size, with_(flat, lambda x: torch.add(x, x)))
    yield probe("gelu", 2 * size, with_(flat, lambda x: F.gelu(x, approximate="tanh")))
    yield probe("gelu_backward", 3 * size, with_(flat, lambda x: ops.gelu_backward(x, x, approximate="tanh")))
    yield probe("norm", 2 * size, with_(rows, lambda x: F.layer_norm(x, (ROW,), weight, weight)))
    yield probe("norm_backward", 3 * size, with_(rows, norm_gradient))
    yield probe("softmax", 2 * size, with_(rows, lambda x: torch.softmax(x, -1)))
    yield probe("group_norm", 2 * size, with_(rows, lambda x: F.group_norm(x.view(1, 32, -1), 32)))
    yield probe("group_norm_backward", 3 * size, with_(rows, group_norm_gradient))
    yield probe("strided", 2 * size, with_(rows, lambda x: x.view(16, -1, HEAD).transpose(0, 1).contiguous()))
    yield probe("normal", size, with_(flat, lambda x: x.normal_()))
    yield probe("unpack_int8", size + 1, lambda count: int8_unpacking(rows(count)))
    yield probe("unpack_nf4", size + 0.5, lambda count: nf4_unpacking(rows(count)))
    yield probe("adam8bit", 2 * size + 2, lambda count: adam8bit_update(flat(count)))
    if int8_problem(device) is None:
        yield probe("int8_rows", size + 1, with_(rows, int8_rows))


def copies(device: torch.device) -> Iterator[TimingProbe]:
    """Yield copies between pinned host memory and the device, as ``to_device.bytes`` and ``to_host.bytes``."""
    axes = {"bytes": [2**12, 2**16, 2**20, 2**24, 2**28]}

    def build(back: bool, size: int) -> Call:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        target, source = (host, there) if back else (there, host)
        return partial(target.copy_, source, non_blocking=True)

    yield TimingProbe("to_device.bytes", axes, partial(build, False), int)
    yield TimingProbe("to_host.bytes", axes, partial(build, True), int)


def int8_products(device: torch.device) -> Iterator[TimingProbe]:
    """Yield the project's int8 products, forward and for the input's gradient (``int8_gradient``)."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16
    widths = [320, 1536, 6144] if cuda else [64, 256, 1024]
    axes = {"rows": [256, 1024, 4096, 16384] if cuda else [64, 256, 1024], "outputs": widths, "sum": widths}

    def build(transposed: bool, m: int, n: int, k: int) -> Call:
        x, weight = (torch.ones(shape, dtype=torch.int8, device=device) for shape in ((m, k), (n, k)))
        scale, columns = torch.ones(m, device=device), torch.ones(n, device=device)
        if transposed:
            return partial(int8_product, x, scale, weight.t().contiguous().t(), None, None, dtype)
        return partial(int8_product, x, scale, weight, columns, None, dtype)

    def size(m: int, n: int, k: int) -> int:
        return m * k + n * k + 2 * m * n

    yield TimingProbe("int8_product.bf16", axes, partial(build, False), size)
    few = {**axes, "rows": axes["rows"][1:3], "outputs": widths[1:], "sum": widths[1:]}
    yield TimingProbe("int8_gradient.bf16", few, partial(build, True), size)


# The single operations and their operands


def norm_gradient(x: Tensor) -> object:
    """Compute the gradient of layer norm's input."""
    mean = x.new_zeros((len(x), 1), dtype=torch.float32)
    mean = mean if x.device.type == "cuda" else mean.to(x.dtype)
    return torch.ops.aten.native_layer_norm_backward(x, x, [ROW], mean, mean, None, None, [True, False, False])


def group_norm_gradient(x: Tensor) -> object:
    """Compute the gradient of group norm's input."""
    means, area = x.new_zeros((1, 32)), x.numel() // 32
    grad = x.view(1, 32, area)
    return torch.ops.aten.native_group_norm_backward(
        grad, grad, means, means, None, 1, 32, area, 32, [True] + [False] * 2
    )


def int8_unpacking(x: Tensor) -> Call:
    """Dequantise an int8 weight as the frozen int8 layers do."""
    q, scale = torch.ones_like(x, dtype=torch.int8), torch.ones(len(x), device=x.device)
    return lambda: dequantise_weight(q, scale, x.dtype)


def nf4_unpacking(x: Tensor) -> Call:
    """Dequantise an nf4 weight."""
    import bitsandbytes  # noqa: F401 registers the kernels

    packed = torch.zeros((x.numel() // 2, 1), dtype=torch.uint8, device=x.device)
    scales = torch.ones(x.numel() // BLOCK, device=x.device)
    unpack = torch.ops.bitsandbytes.dequantize_4bit.default
    return lambda: unpack(packed, scales, BLOCK, "nf4", tuple(x.shape), x.dtype)


def adam8bit_update(x: Tensor) -> Call:
    """Update by bitsandbytes' Adam with 8-bit state."""
    from bitsandbytes.functional import create_dynamic_map

    states = [torch.zeros(x.numel(), dtype=torch.uint8, device=x.device) for _ in range(2)]
    maps = [create_dynamic_map(signed).to(x.device) for signed in (True, False)]
    scales = [torch.ones(-(-x.numel() // 256), device=x.device) for _ in range(2)]
    update, numbers = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default, (0.9, 0.999, 0.0, 0.0, 1e-8)
    return lambda: update("adam", x, x, *states, *numbers, 1, 1e-4, *maps, *scales, 0.0, 1.0, False)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fill a tensor with random values: a power-limited card multiplies zeros faster."""
    count = math.prod(shape)
    pool = _pool(device, dtype)
    values = pool.repeat(-(-count // len(pool)))[:count] if count > len(pool) else pool[:count].clone()
    return values.view(shape)


def forget_values() -> None:
    """Free the values that ``random_tensor`` repeats."""
    _pool.cache_clear()


@cache
def _pool(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(2**24, device=device).mul_(0.1).to(dtype)
