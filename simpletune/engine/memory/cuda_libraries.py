"""What CUDA's libraries do by compute capability: the attention kernel and cuBLAS's workspaces. Imports no torch."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from simpletune.system.environment import version_or_none
from simpletune.system.gpus import CARDS

MIB = 2**20


def attention_kernel(capability: tuple[int, int], dtype: str, asked: str = "auto", masked: bool = False) -> str:
    """Name the kernel that computes a model's attention: flash, cudnn, efficient or math; ``asked``,
    ``speed.attention``, overrides the choice unless it is auto."""
    if asked != "auto":
        return asked
    # The order of torch 2.13's ``_fused_sdp_choice_cuda`` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
    # without cuDNN, which ``choose_device`` leaves out: flash from Ampere on, which takes 16-bit types only, no mask.
    return "efficient" if masked or dtype == "fp32" or capability < (8, 0) else "flash"


def most_multiprocessors(capability: tuple[int, int]) -> int:
    """Return the multiprocessors of the largest known card of a compute capability, or of any if none is known."""
    known = {card.capability: 0 for card in CARDS}
    for card in CARDS:
        known[card.capability] = max(known[card.capability], card.multiprocessors or 0)
    return known.get(capability, max(known.values()))


class Workspaces(NamedTuple):
    """Bytes of cuBLAS's workspaces."""

    kept: int
    """From the first product on."""
    within: int
    """Within a product, for its time."""


def cublas_workspaces(capability: tuple[int, int], threads: int = 2, deterministic: bool = False) -> Workspaces:
    """Return what cuBLAS takes with the installed torch, where ``threads`` multiply matrices on the device."""
    # torch's aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, and in the deterministic mode
    # 8 x 4096 KiB on every card. Until 2.14 one handle per thread (forward's and, after the first backward pass,
    # autograd's) kept one workspace per stream, which cuBLASLt shared. From 2.15 on a product's is freed at its end,
    # and cuBLASLt's (of products with a bias) is 1 MiB, which is left out (both seen on simulated cards).
    each = 32 * MIB if deterministic or capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024
    return Workspaces(0, each) if frees_workspaces() else Workspaces(threads * each, 0)


def cublas_workspace(capability: tuple[int, int], threads: int = 2, deterministic: bool = False) -> int:
    """Return the most bytes that cuBLAS takes; see ``cublas_workspaces``."""
    return sum(cublas_workspaces(capability, threads, deterministic))


@cache
def frees_workspaces() -> bool:
    """Return whether the installed torch frees cuBLAS's workspace after each product."""
    major, minor = (version_or_none("torch") or "0.0").split(".")[:2]
    return (int(major), int(minor)) >= (2, 15)
