"""Compile a model block by block with ``torch.compile``; log the reason if the machine cannot.

Blocks of equal structure share compiled code. Training compiles only a block's own forward pass; its wrappers
(checkpointing, offloading of weights and of checkpoint inputs) stay eager.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simpletune.engine.denoiser import model_units
from simpletune.engine.fp16_blocks import block_pass_of
from simpletune.system.console import say
from simpletune.system.options import UserError

# Blocks have few distinct structures: in LoRA training the first gets no gradient, and the last lacks a stream. Beyond
# this limit, torch would silently stop compiling.
GRAPHS = 64
# Random draws (LoRA dropout) match those of eager mode.
INDUCTOR: dict[str, Any] = {"options": {"fallback_random": True}}
SIZES = {3: (1,), 4: (2, 3)}
"""The dimensions that vary with the size of pictures, by their number: n of [b, n, d]; h and w of [b, c, h, w]."""


def compile_blocks(denoiser: nn.Module, device: torch.device) -> bool:
    """Compile each block of a model in place, with its forward pass already wrapped; return whether it could."""
    if not can_compile(device):
        return False
    for block in model_units(denoiser):
        watched = block_pass_of(block)
        if watched is None:
            block.compile(dynamic=False)
        else:
            watched.fast = torch.compile(watched.plain, dynamic=False)
    return True


def compile_training(blocks: Sequence[nn.Module], device: torch.device, sizes: int) -> bool:
    """Compile the forward and backward passes of a model's blocks in place.

    Passes without gradients stay eager: evaluation and generation use other shapes, and too few passes to repay it.

    Args:
        blocks: the blocks with their adapter, before their forward passes are wrapped.
        sizes: how many image sizes the run has. With one, kernels are specialised for it; with several, they accept
            any size from the start, so that a resumed run gets the same kernels whatever size comes first.

    Returns:
        Whether the blocks are compiled.
    """
    if not can_compile(device):
        return False
    # Blocks under a modulation plan differ only in integer attributes, which must not trigger a recompilation each.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for block in blocks:
        watched = block_pass_of(block)
        eager = block.forward if watched is None else watched.plain
        compiled = partial(_forward, eager, torch.compile(eager, **INDUCTOR), sizes > 1)
        if watched is None:
            block.forward = compiled
        else:
            watched.fast = compiled
    return True


def _forward(eager: Callable[..., Any], compiled: Callable[..., Any], any_size: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a block, compiled if gradients are enabled; with ``any_size`` the ``SIZES`` of its inputs are dynamic."""
    if not torch.is_grad_enabled():
        return eager(*args, **kwargs)
    if any_size:
        for tensor in (*args, *kwargs.values()):
            for dimension in SIZES.get(tensor.dim(), ()) if isinstance(tensor, Tensor) else ():
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    return compiled(*args, **kwargs)


def compiler_error(error: Exception) -> UserError | None:
    """Describe a compiler failure in the middle of a run for users; return None for any other error."""
    compiler = sys.modules.get("torch._dynamo.exc")
    if compiler is None or not isinstance(error, compiler.TorchDynamoException):
        return None
    words = " ".join(str(error).split())[:300]
    return UserError(
        f"speed.compile: compiling a block failed ({type(error).__name__}: {words}). Use speed.compile=false"
    )


def can_compile(device: torch.device) -> bool:
    """Return whether this machine can compile for a device; log the reason if not."""
    reason = compile_problem(device)
    if reason is not None:
        say(f"compile NOT compiled, continuing in eager mode: {reason}")
        return False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    return True


def compile_problem(device: torch.device) -> str | None:
    """Return why compiling a one-line function fails on this machine; None if it succeeds."""

    def line(x: Tensor) -> Tensor:
        return x * 2 + 1

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(line)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:  # no compiler, no headers, no Triton, or one that fails
        words = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        remedy = "torch.compile needs a C compiler (gcc or CXX) and Python's headers, and on a GPU also Triton"
        return f"{words.strip()[:200]} ({remedy})"
    return None
