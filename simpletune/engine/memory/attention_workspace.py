"""CUDA's attention kernels: which one torch chooses, its temporary bytes, and the layouts of its tensors.

The simulation runs the CPU's fused attention. This module holds what differs on a GPU.

Shapes: b samples, h heads, S tokens, d width of a head; all tensors are [b, h, S, d].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_ROWS, FLASH_WIDTH = 128, 32  # flash attention rounds sequence length and head width up to multiples of these
EFFICIENT_ROWS = 64  # memory-efficient attention rounds the sequence length up to a multiple of this
WIDEST_IN_REGISTERS = 128  # a wider head's output is summed in memory by memory-efficient attention
WIDEST_IN_FLASH = 256  # flash and cuDNN take no wider heads


def attention_kernel(capability: tuple[int, int], dtype: torch.dtype, asked: str = "auto") -> str:
    """Name the kernel that computes SD3's attention, which has no mask and no dropout.

    Source: the order of torch 2.13's ``_fused_sdp_choice_cuda`` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp):
    cuDNN first on Hopper and datacenter Blackwell, otherwise flash from Ampere on; both take 16-bit types only.

    Returns:
        ``flash``, ``cudnn``, ``efficient`` or ``math``; with ``asked``, ``speed.attention``, other than auto that one.
    """
    if asked != "auto":
        return asked
    if dtype == torch.float32 or capability < (8, 0):
        return "efficient"
    return "cudnn" if capability[0] in (9, 10) else "flash"


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: object, **__: object
) -> int:
    """Bytes for flash attention's backward pass.

    They are fp32 sums of grad q, rounded up, one fp32 per row, and copies of ``grad_out`` and ``out`` where these are
    not [b, S, h, d] in memory.

    Source: torch's third_party flash-attention, csrc/flash_attn/flash_api.cpp, mha_bwd: ``dq_accum`` and ``softmax_d``,
    in the non-deterministic mode; aten/src/ATen/native/transformers/cuda/attention_backward.cu: ``contiguous_out``.
    """
    copied = [tensor for tensor in (grad_out, out) if not tensor.transpose(1, 2).is_contiguous()]
    return _flash_sums(query) + sum(tensor.numel() * tensor.element_size() for tensor in copied)


def cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: object, **__: object
) -> int:
    """Bytes for cuDNN attention's backward pass: an assumption; we have never run it.

    torch copies ``grad_out`` to the layout of ``out`` if they differ (aten/src/ATen/native/cudnn/MHA.cpp). cuDNN's plan
    asks for a workspace whose size is known only on a GPU; this assumes fp32 sums of grad q and one fp32 per row, as in
    flash attention.
    """
    copied = grad_out.stride() != out.stride()
    return _flash_sums(query) + copied * grad_out.numel() * grad_out.element_size()


def _flash_sums(query: Tensor) -> int:
    b, heads, rows, width = query.shape
    return 4 * b * heads * _up(rows, FLASH_ROWS) * (_up(width, FLASH_WIDTH) + 1)


def efficient_forward(query: Tensor, *_: object, **__: object) -> int:
    """Bytes for memory-efficient attention's forward pass: an fp32 output for wide heads in a 16-bit type.

    Source: torch's mem_eff_attention/kernel_forward.h, ``kNeedsOutputAccumulatorBuffer``.
    """
    wide = query.shape[-1] > WIDEST_IN_REGISTERS and query.element_size() == 2
    return 4 * query.numel() if wide else 0


def efficient_backward(grad_out: Tensor, query: Tensor, *_: object, **__: object) -> int:
    """Bytes for memory-efficient attention's backward pass: one fp32 per row, and in 16-bit types fp32 sums of grad q.

    Source: torch's attention_backward.cu, ``delta``; mem_eff_attention/kernel_backward.h, ``workspace_elements_gq``.
    """
    b, heads, rows, width = query.shape
    sums = 4 * b * heads * _up(rows, EFFICIENT_ROWS) * width if query.element_size() == 2 else 0
    return sums + 4 * b * heads * rows


BACKWARDS = {"flash": flash_backward, "cudnn": cudnn_backward, "efficient": efficient_backward}


def cuda_layouts(kernel: str) -> Callable[[OpOverload, Sequence[Any], object], object]:
    """Return a function for an ``Accounting`` that lays out the results of the CPU's attention as a CUDA kernel would.

    The copies that follow depend on the layout. Memory-efficient attention writes its output as [b, S, h, d]; the
    others write output and gradients in the query's layout. The CPU writes the output in the query's layout, and
    gradients as [b, S, h, d].

    Args:
        kernel: from ``attention_kernel``.
    """
    efficient = kernel == "efficient"

    def laid_out(op: OpOverload, args: Sequence[Any], output: Any) -> object:
        if op is FORWARD and (efficient or args[0].shape[-1] > WIDEST_IN_FLASH):
            out, sums = output
            return out.transpose(1, 2).contiguous().transpose(1, 2), sums
        if op is BACKWARD and not efficient:
            return tuple(torch.empty_like(like).copy_(grad) for grad, like in zip(output, args[1:4], strict=True))
        return output

    return laid_out


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
