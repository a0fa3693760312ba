"""Memory that CUDA kernels and libraries allocate internally, which the accounting of tensor bytes cannot see.

Each term cites its source; attention_workspace.py has those of attention. Terms for torch's own code were compared with
torch's CUDA allocator on a simulated card (``python -m benchmarks dry``); terms for libraries are unverified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from simpletune.engine.kernels import adaln, rms_norm  # noqa: F401 define their operators
from simpletune.engine.kernels.sizes import partial_bytes, rows_of
from simpletune.engine.memory.accounting import Temporaries
from simpletune.engine.memory.attention_workspace import BACKWARD, BACKWARDS, FORWARD, efficient_forward

MIB = 2**20
MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR = 58, 1536  # an L4's
REDUCING_THREADS = 512  # a block's in torch's reductions
FEW, MANY = 16, 256  # values that a thread sums: fewest and most


def quanto_product(activations: Tensor, weights: Tensor, scales: Tensor) -> int:  # [n, i], int8 [o, i], [o, 1]
    """Bytes for quanto's product on CUDA, which first dequantises the whole int8 weight to the activations' type.

    Source: optimum-quanto's library/qbytes_mm.py, ``qbytes_mm`` in its CUDA registration.
    """
    return weights.numel() * scales.element_size()


def reduction(x: Tensor, dim: Sequence[int] | int | None = None, *_: object, **__: object) -> int:
    """Bytes for a contiguous tensor's sum or mean over leading dimensions, which several thread blocks share through a
    buffer.

    Source: torch's aten/src/ATen/native/cuda/Reduce.cuh, ``setReduceConfig`` and ``global_memory_size``, with an L4's
    multiprocessors. Other reductions need little: their buffer holds one number per output and thread block.
    """
    listed = [dim] if isinstance(dim, int) else dim or ()
    dims = sorted({number % x.dim() for number in listed}) if x.dim() else []
    if not x.is_contiguous() or dims != list(range(len(dims))) or len(dims) in (0, x.dim()):
        return 0
    # The sum of ``inputs`` rows of ``outputs`` contiguous fp32 columns.
    inputs, outputs = math.prod(x.shape[: len(dims)]), math.prod(x.shape[len(dims) :])
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)
    most = REDUCING_THREADS // vector
    width, height = min(_power(outputs // vector), most), min(_power(inputs), most)
    block_height = min(height, most // min(width, 32))
    block_width = min(width, most // block_height)
    values = -(-inputs // block_height)
    grid = -(-(outputs // vector) // block_width)
    target = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // (block_width * block_height))
    if inputs < min(FEW * block_height, MANY) or values < MANY or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // FEW)), -(-values // MANY))
    return 4 * outputs * blocks * block_width * vector if blocks > 1 else 0


def _power(size: int) -> int:
    """The largest power of two up to a size."""
    return 1 << (size.bit_length() - 1)


def modulate_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    grad_total: Tensor | None,
    scales: Sequence[Tensor],
    statistics: Sequence[Tensor],
    eps: float,
    trains: bool,
) -> int:
    """Bytes for partial sums of the gradients of modulations, and for those sums in fp32.

    Source: engine/kernels/adaln_kernels.py.
    """
    return _sums(x, 2 * len(scales) + (gate is not None)) if trains else 0


def gate_backward(grad: Tensor, y: Tensor | None, gate: Tensor) -> int:
    """Bytes for partial sums of a gate's gradient, which it has if y is given; see ``modulate_backward``."""
    return 0 if y is None else _sums(grad, 1)


def _sums(x: Tensor, count: int) -> int:
    in_fp32 = 4 * count * x.shape[0] * x.shape[2]
    return partial_bytes(x, count) + (0 if x.dtype == torch.float32 else in_fp32)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, trains: bool) -> int:
    """Bytes for partial sums of the gradient of a norm's weight [d], and for that sum in fp32.

    Source: engine/kernels/rms_kernels.py.
    """
    d = x.shape[-1]
    in_fp32 = 0 if x.dtype == torch.float32 else 4 * d
    return 4 * d * -(-(x.numel() // d) // rows_of(d)) + in_fp32 if trains else 0


def convolution_workspace(
    pixels: Tensor,  # [b, c, h, w]
    weight: Tensor,  # [o, c / groups, kh, kw]
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_: object,
) -> int:
    """Bytes for cuDNN's workspace of a convolution: an allowance; we have neither measured nor run it.

    cuDNN chooses its algorithm on the card and asks torch for a workspace (aten/src/ATen/native/cudnn/Conv_v8.cpp,
    ``run_conv_plan``). Its tensor-core kernels compute on [b, h, w, c]; torch's tensors are [b, c, h, w], so input,
    weight and output are converted. The allowance is one copy of each.
    """
    pads = list(padding) * (2 if len(padding) == 1 else 1)  # torch gives one number for padding="valid"
    sizes = zip(pixels.shape[2:], weight.shape[2:], stride, pads, dilation, strict=True)
    area = math.prod((size + 2 * pad - hole * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, hole in sizes)
    output = pixels.shape[0] * weight.shape[0] * area
    return (pixels.numel() + weight.numel() + output) * pixels.element_size()


def convolution_backward_workspace(grad: Tensor, pixels: Tensor, weight: Tensor, *_: object) -> int:
    """Bytes for cuDNN's workspace of a convolution's gradients: an allowance like ``convolution_workspace``."""
    return (grad.numel() + pixels.numel() + weight.numel()) * pixels.element_size()


def temporaries(attention: str = "flash") -> Temporaries:
    """Temporary bytes of CUDA kernels, by operation; the CPU's attention stands in for that of ``attention_kernel``."""
    from optimum.quanto import qint8  # noqa: F401 registers quanto's operations

    terms: dict = {
        FORWARD: efficient_forward,
        torch.ops.quanto.qbytes_mm.default: quanto_product,
        torch.ops.aten.sum.dim_IntList: reduction,
        torch.ops.aten.mean.dim: reduction,
        torch.ops.simpletune.modulate_backward.default: modulate_backward,
        torch.ops.simpletune.gate_backward.default: gate_backward,
        torch.ops.simpletune.rms_norm_backward.default: rms_norm_backward,
        torch.ops.aten.convolution.default: convolution_workspace,
        torch.ops.aten.convolution_backward.default: convolution_backward_workspace,
    }
    return terms | ({BACKWARD: BACKWARDS[attention]} if attention in BACKWARDS else {})


def cublas_workspace(capability: tuple[int, int], threads: int = 2) -> int:
    """Bytes of cuBLAS's permanent workspaces: one for each thread that multiplies matrices (forward's and autograd's).

    Source: torch's aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, otherwise 2 x 4096 KiB +
    8 x 16 KiB; one handle per thread, one workspace per handle and stream. cuBLASLt shares them. ``threads`` is 1
    before the first backward pass.
    """
    each = 32 * MIB if capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024
    return threads * each
