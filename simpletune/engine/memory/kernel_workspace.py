"""Memory that CUDA kernels and libraries allocate internally, which the accounting of tensor bytes cannot see.

Each term cites its source. Terms for torch's own code were compared with torch's CUDA allocator on a simulated card
(``python -m benchmarks dry``); terms for libraries are unverified. The simulation runs the CPU's fused attention: this
module also says how CUDA's kernel would lay out its tensors, which is another one where attention has a mask.

Shapes of attention: b samples, h heads, S tokens, d width of a head; all tensors are [b, h, S, d].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from simpletune.engine.kernels import adaln, rms_norm, rotary, swiglu  # noqa: F401 define their operators
from simpletune.engine.kernels.sizes import partial_bytes, rows_of
from simpletune.engine.memory.accounting import Temporaries

MIB = 2**20
MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR = 58, 1536  # an L4's
REDUCING_THREADS = 512  # a block's in torch's reductions
FEW, MANY = 16, 256  # values that a thread sums: fewest and most
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_ROWS, FLASH_WIDTH = 128, 32  # flash attention rounds sequence length and head width up to multiples of these
EFFICIENT_ROWS = 64  # memory-efficient attention rounds the sequence length up to a multiple of this
WIDEST_IN_REGISTERS = 128  # a wider head's output is summed in memory by memory-efficient attention
WIDEST_IN_FLASH = 256  # flash and cuDNN take no wider heads


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *_: object,
    multiprocessors: int | None = None,
    **__: object,
) -> int:
    """Return the bytes for flash attention's backward pass."""
    # fp32 sums of grad q, rounded up, one fp32 per row, and copies of ``grad_out`` and ``out`` where these are not
    # [b, S, h, d] in memory. In the deterministic mode, each of a head's thread blocks has sums of grad q of its own.
    # torch's third_party flash-attention, csrc/flash_attn/flash_api.cpp, mha_bwd: ``dq_accum``, ``nsplits`` and
    # ``softmax_d``; aten/src/ATen/native/transformers/cuda/attention_backward.cu: ``contiguous_out``
    copied = [tensor for tensor in (grad_out, out) if not tensor.transpose(1, 2).is_contiguous()]
    splits = 1 if multiprocessors is None else -(-multiprocessors // (query.shape[0] * query.shape[1]))
    return _flash_sums(query, splits) + sum(tensor.numel() * tensor.element_size() for tensor in copied)


def cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: object, **__: object
) -> int:
    """Return the bytes for cuDNN attention's backward pass: an assumption; we have never run it."""
    # torch copies ``grad_out`` to the layout of ``out`` if they differ (aten/src/ATen/native/cudnn/MHA.cpp). cuDNN's
    # plan asks for a workspace whose size is known only on a GPU; this assumes fp32 sums of grad q and one fp32 per
    # row, as in flash attention.
    copied = grad_out.stride() != out.stride()
    return _flash_sums(query) + copied * grad_out.numel() * grad_out.element_size()


def _flash_sums(query: Tensor, splits: int = 1) -> int:
    b, heads, rows, width = query.shape
    return 4 * b * heads * _round_up(rows, FLASH_ROWS) * (splits * _round_up(width, FLASH_WIDTH) + 1)


def efficient_forward(query: Tensor, *_: object, **__: object) -> int:
    """Return the bytes for memory-efficient attention's forward pass: an fp32 output for wide heads in a 16-bit
    type."""
    # torch's mem_eff_attention/kernel_forward.h, ``kNeedsOutputAccumulatorBuffer``
    wide = query.shape[-1] > WIDEST_IN_REGISTERS and query.element_size() == 2
    return 4 * query.numel() if wide else 0


def efficient_backward(grad_out: Tensor, query: Tensor, *_: object, **__: object) -> int:
    """Return the bytes for memory-efficient attention's backward pass."""
    # One fp32 per row, and in 16-bit types fp32 sums of grad q: torch's attention_backward.cu, ``delta``;
    # mem_eff_attention/kernel_backward.h, ``workspace_elements_gq``.
    b, heads, rows, width = query.shape
    sums = 4 * b * heads * _round_up(rows, EFFICIENT_ROWS) * width if query.element_size() == 2 else 0
    return sums + 4 * b * heads * rows


BACKWARDS = {"flash": flash_backward, "cudnn": cudnn_backward, "efficient": efficient_backward}


def masked_kernel(kernel: str, mask: Tensor | None) -> str:
    """Return the kernel of a call of attention where ``kernel`` computes those without a mask."""
    # flash takes no mask
    return "efficient" if kernel == "flash" and mask is not None else kernel


def cuda_layouts(kernel: str) -> Callable[[OpOverload, Sequence[Any], Mapping[str, Any], object], object]:
    """Return a function for an ``Accounting`` that lays out the results of the CPU's attention as a CUDA kernel would.

    The copies that follow depend on the layout. Memory-efficient attention writes its output as [b, S, h, d]; the
    others write output and gradients in the query's layout. The CPU writes the output in the query's layout, and
    gradients as [b, S, h, d].

    Args:
        kernel: from ``attention_kernel``, for attention without a mask.
    """

    def laid_out(op: OpOverload, args: Sequence[Any], named: Mapping[str, Any], output: Any) -> object:
        efficient = masked_kernel(kernel, named.get("attn_mask")) == "efficient"
        if op is FORWARD and (efficient or args[0].shape[-1] > WIDEST_IN_FLASH):
            out, sums = output
            return out.transpose(1, 2).contiguous().transpose(1, 2), sums
        if op is BACKWARD and not efficient:
            return tuple(torch.empty_like(like).copy_(grad) for grad, like in zip(output, args[1:4], strict=True))
        return output

    return laid_out


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def quanto_product(activations: Tensor, weights: Tensor, scales: Tensor) -> int:  # [n, i], int8 [o, i], [o, 1]
    """Return the bytes of the int8 weight, dequantised to the activations' type."""
    # optimum-quanto's library/qbytes_mm.py, ``qbytes_mm`` in its CUDA registration
    return weights.numel() * scales.element_size()


def reduction(x: Tensor, dim: Sequence[int] | int | None = None, *_: object, **__: object) -> int:
    """Return the bytes for a contiguous tensor's sum or mean over leading dimensions, which several thread blocks share
    through a buffer.

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
    width, height = min(_power_of_two(outputs // vector), most), min(_power_of_two(inputs), most)
    block_height = min(height, most // min(width, 32))
    block_width = min(width, most // block_height)
    values = -(-inputs // block_height)
    grid = -(-(outputs // vector) // block_width)
    target = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // (block_width * block_height))
    if inputs < min(FEW * block_height, MANY) or values < MANY or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // FEW)), -(-values // MANY))
    return 4 * outputs * blocks * block_width * vector if blocks > 1 else 0


def _power_of_two(size: int) -> int:
    """Return the largest power of two up to a size."""
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
    """Return the bytes for fp32 sums of the gradients of modulations."""
    return _sums(x, 2 * len(scales) + (gate is not None)) if trains else 0


def gate_backward(grad: Tensor, y: Tensor | None, gate: Tensor) -> int:
    """Return the bytes for fp32 sums of a gate's gradient, which it has if y is given; see ``modulate_backward``."""
    return 0 if y is None else _sums(grad, 1)


def _sums(x: Tensor, count: int) -> int:
    # of programs (engine/kernels/adaln_kernels.py), and of samples
    in_fp32 = 4 * count * x.shape[0] * x.shape[2]
    return partial_bytes(x, count) + (0 if x.dtype == torch.float32 else in_fp32)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, trains: bool) -> int:
    """Return the bytes for fp32 sums of the gradient of a norm's weight [d]."""
    # partial sums of programs (engine/kernels/rms_kernels.py), and their sum
    d = x.shape[-1]
    in_fp32 = 0 if x.dtype == torch.float32 else 4 * d
    return 4 * d * -(-(x.numel() // d) // rows_of(d)) + in_fp32 if trains else 0


def rms_norm_rotary_backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    early: bool,
    trains: bool,
) -> int:
    """Return the bytes for fp32 sums of the gradient of a norm's weight, of the largest part."""
    return max(rms_norm_backward(grad, x, weight, eps, trains) for x, weight in zip(parts, weights, strict=True))


def convolution_workspace(
    pixels: Tensor,  # [b, c, h, w]
    weight: Tensor,  # [o, c / groups, kh, kw]
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_: object,
) -> int:
    """Return the bytes for cuDNN's workspace of a convolution: an allowance; we have neither measured nor run it."""
    # cuDNN chooses its algorithm on the card and asks torch for a workspace (aten/src/ATen/native/cudnn/Conv_v8.cpp,
    # ``run_conv_plan``). Its tensor-core kernels compute on [b, h, w, c]; torch's tensors are [b, c, h, w], so input,
    # weight and output are converted. The allowance is one copy of each.
    pads = list(padding) * (2 if len(padding) == 1 else 1)  # torch gives one number for padding="valid"
    sizes = zip(pixels.shape[2:], weight.shape[2:], stride, pads, dilation, strict=True)
    area = math.prod((size + 2 * pad - hole * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, hole in sizes)
    output = pixels.shape[0] * weight.shape[0] * area
    return (pixels.numel() + weight.numel() + output) * pixels.element_size()


def convolution_backward_workspace(grad: Tensor, pixels: Tensor, weight: Tensor, *_: object) -> int:
    """Return the bytes for cuDNN's workspace of a convolution's gradients; see ``convolution_workspace``."""
    return (grad.numel() + pixels.numel() + weight.numel()) * pixels.element_size()


def temporaries(attention: str = "flash", multiprocessors: int | None = None) -> Temporaries:
    """Return the temporary bytes of CUDA kernels, by operation; the CPU's attention stands in for that of
    ``attention_kernel``, ``attention`` where it has no mask. ``multiprocessors``: of the card, in the deterministic
    mode."""
    backwards = BACKWARDS | {"flash": partial(flash_backward, multiprocessors=multiprocessors)}

    def attention_backward(*args: Tensor, attn_mask: Tensor | None = None, **named: Any) -> int:
        return backwards[masked_kernel(attention, attn_mask)](*args, **named)

    terms: dict = {
        FORWARD: efficient_forward,
        torch.ops.aten.sum.dim_IntList: reduction,
        torch.ops.aten.mean.dim: reduction,
        torch.ops.simpletune.modulate_backward.default: modulate_backward,
        torch.ops.simpletune.gate_backward.default: gate_backward,
        torch.ops.simpletune.rms_norm_backward.default: rms_norm_backward,
        torch.ops.simpletune.rms_norm_rotary_backward.default: rms_norm_rotary_backward,
        torch.ops.aten.convolution.default: convolution_workspace,
        torch.ops.aten.convolution_backward.default: convolution_backward_workspace,
    }
    if hasattr(torch.ops.quanto, "qbytes_mm"):  # registered where a base in int8-quanto was made
        terms[torch.ops.quanto.qbytes_mm.default] = quanto_product
    return terms | ({BACKWARD: attention_backward} if attention in BACKWARDS else {})
