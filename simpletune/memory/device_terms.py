"""What CUDA's kernels and libraries allocate for themselves: the one table of what a tensor-byte accounting cannot see.

Each term names its source. They are predictions until a GPU has measured them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simpletune.memory.accounting import Temporaries

MIB = 2**20
ROWS = 128  # flash attention rounds the sequence up to this
HEAD_STEP = 32  # and the head's width to this


def flash_backward(grad_out: Tensor, query: Tensor, *_: object, **__: object) -> int:
    """Flash attention's backward pass sums grad q in fp32: [b, S, h, d] rounded up, and keeps one fp32 a row.

    Source: torch's third_party flash-attention, csrc/flash_attn/flash_api.cpp, mha_bwd: ``dq_accum`` and ``softmax_d``,
    in the non-deterministic mode.

    Args:
        grad_out: [b, h, S, d].
        query: [b, h, S, d].
    """
    b, heads, rows, width = query.shape
    rows, width = -(-rows // ROWS) * ROWS, -(-width // HEAD_STEP) * HEAD_STEP
    return 4 * b * heads * rows * (width + 1)


def quanto_product(activations: Tensor, weights: Tensor, scales: Tensor) -> int:
    """quanto's product on CUDA scales the whole int8 weight up to the activations' type first.

    Source: optimum-quanto's library/qbytes_mm.py, ``qbytes_mm`` behind the CUDA registration.

    Args:
        activations: [n, i].
        weights: int8 [o, i].
        scales: [o, 1].
    """
    return weights.numel() * scales.element_size()


def temporaries() -> Temporaries:
    """What operations' kernels hold on CUDA while they run; the CPU's attention stands for CUDA's flash attention."""
    from optimum.quanto import qint8  # noqa: F401 registers quanto's operations

    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_backward,
        torch.ops.quanto.qbytes_mm.default: quanto_product,
    }


def cublas_workspace(capability: tuple[int, int], threads: int = 2) -> int:
    """What cuBLAS keeps for good: a workspace for each thread that multiplies, forward's and autograd's.

    Source: torch's aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, else 2 x 4096 KiB +
    8 x 16 KiB; a handle for each thread, a workspace for each handle and stream. cuBLASLt shares them.

    Args:
        capability: of the device, (8, 9) for an L4.
        threads: 1 as long as there was no backward pass.
    """
    each = 32 * MIB if capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024
    return threads * each
