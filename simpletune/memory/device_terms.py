"""Memory that CUDA kernels and libraries allocate internally, which the accounting of tensor bytes cannot see.

Each term cites its source. The terms are predictions until measured on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simpletune.memory.accounting import Temporaries

MIB = 2**20
ROWS = 128  # flash attention rounds the sequence length up to a multiple of this
HEAD_STEP = 32  # and the head width to a multiple of this


def flash_backward(grad_out: Tensor, query: Tensor, *_: object, **__: object) -> int:
    """Bytes for flash attention's backward pass: fp32 sums of grad q [b, S, h, d], rounded up, and one fp32 per row.

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
    """Bytes for quanto's product on CUDA, which first dequantises the whole int8 weight to the activations' type.

    Source: optimum-quanto's library/qbytes_mm.py, ``qbytes_mm`` in its CUDA registration.

    Args:
        activations: [n, i].
        weights: int8 [o, i].
        scales: [o, 1].
    """
    return weights.numel() * scales.element_size()


def temporaries() -> Temporaries:
    """Temporary bytes of CUDA kernels, by operation; the CPU's attention stands in for CUDA's flash attention."""
    from optimum.quanto import qint8  # noqa: F401 registers quanto's operations

    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_backward,
        torch.ops.quanto.qbytes_mm.default: quanto_product,
    }


def cublas_workspace(capability: tuple[int, int], threads: int = 2) -> int:
    """Bytes of cuBLAS's permanent workspaces: one for each thread that multiplies matrices (forward's and autograd's).

    Source: torch's aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, otherwise 2 x 4096 KiB +
    8 x 16 KiB; one handle per thread, one workspace per handle and stream. cuBLASLt shares them.

    Args:
        capability: the device's compute capability, (8, 9) for an L4.
        threads: 1 before the first backward pass.
    """
    each = 32 * MIB if capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024
    return threads * each
