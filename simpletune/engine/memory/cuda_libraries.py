"""What CUDA's libraries do by compute capability: the attention kernel and cuBLAS's workspaces. Imports no torch."""

from __future__ import annotations

from simpletune.system.gpus import CARDS

MIB = 2**20


def attention_kernel(capability: tuple[int, int], dtype: str, asked: str = "auto", masked: bool = False) -> str:
    """Name the kernel that computes a model's attention, which has no dropout.

    Source: the order of torch 2.13's ``_fused_sdp_choice_cuda`` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
    without cuDNN, which ``choose_device`` leaves out: flash from Ampere on, which takes 16-bit types only, and no mask.

    Returns:
        ``flash``, ``cudnn``, ``efficient`` or ``math``; with ``asked``, ``speed.attention``, other than auto that one.
    """
    if asked != "auto":
        return asked
    return "efficient" if masked or dtype == "fp32" or capability < (8, 0) else "flash"


def most_multiprocessors(capability: tuple[int, int]) -> int:
    """The multiprocessors of the largest known card of a compute capability, or of any if none is known."""
    known = {card.capability: 0 for card in CARDS}
    for card in CARDS:
        known[card.capability] = max(known[card.capability], card.multiprocessors or 0)
    return known.get(capability, max(known.values()))


def cublas_workspace(capability: tuple[int, int], threads: int = 2, deterministic: bool = False) -> int:
    """Bytes of cuBLAS's permanent workspaces: one for each thread that multiplies matrices (forward's and autograd's).

    Source: torch's aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, otherwise 2 x 4096 KiB +
    8 x 16 KiB; one handle per thread, one workspace per handle and stream. cuBLASLt shares them. ``threads`` is 1
    before the first backward pass. The deterministic mode takes 8 x 4096 KiB on every card.
    """
    each = 32 * MIB if deterministic or capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024
    return threads * each
