"""``torch.compile``, block by block, where the machine can do it; where it cannot, that is said.

Blocks of equal structure share what is compiled. In training it is a block's own forward pass that is compiled: what
stands around it (checkpointing, streamed weights, checkpoint inputs on the host) stays as it is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simpletune.options import UserError
from simpletune.system.console import say

# Blocks differ in structure a few times: the first gets no gradient in LoRA training, the last has one stream less. Far
# more would be a mistake, and past this limit they would silently not be compiled.
GRAPHS = 64
# What is drawn at random (a LoRA's dropout) is drawn as without compiling.
INDUCTOR: dict[str, Any] = {"options": {"fallback_random": True}}
TOKENS = 1  # the dimension of [b, n, d] that pictures of other sizes change


def compile_blocks(transformer: nn.Module, device: torch.device) -> bool:
    """Compile each block of a transformer, in place: blocks of equal structure share what is compiled.

    Args:
        transformer: whose blocks have their passes already.
        device: where it runs.

    Returns:
        Whether they are compiled.
    """
    if not can_compile(device):
        return False
    for block in transformer.transformer_blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False)
    return True


def compile_training(blocks: Sequence[nn.Module], device: torch.device, sizes: int) -> bool:
    """Compile the forward passes of a transformer's blocks, and with them the backward ones, in place.

    Only passes with gradients: evaluating and drawing take other shapes, and too few passes for compiling to pay.

    Args:
        blocks: with their adapter, before anything stands around their passes.
        device: where they run.
        sizes: how many shapes of picture the run has. With one the kernels are made for it; with several they take any
            number of tokens from the start, so that a run that is resumed among other shapes has the same kernels.

    Returns:
        Whether they are compiled.
    """
    if not can_compile(device):
        return False
    # A modulation plan's columns are integers that differ from block to block, and nothing else.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for block in blocks:
        eager = block.forward
        block.forward = partial(_forward, eager, torch.compile(eager, **INDUCTOR), sizes > 1)
    return True


def _forward(eager: Callable[..., Any], compiled: Callable[..., Any], any_size: bool, *args: Any, **kwargs: Any) -> Any:
    """A block's pass; its inputs [b, n, d] are not changed."""
    if not torch.is_grad_enabled():
        return eager(*args, **kwargs)
    if any_size:
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, Tensor) and tensor.dim() == 3:
                torch._dynamo.maybe_mark_dynamic(tensor, TOKENS)
    return compiled(*args, **kwargs)


def failure(error: Exception) -> UserError | None:
    """What to say of an error if compiling has failed in the middle of a run; None: it is another error."""
    compiler = sys.modules.get("torch._dynamo.exc")
    if compiler is None or not isinstance(error, compiler.TorchDynamoException):
        return None
    words = " ".join(str(error).split())[:300]
    return UserError(
        f"speed.compile: compiling a block failed ({type(error).__name__}: {words}). Use speed.compile=false"
    )


def can_compile(device: torch.device) -> bool:
    """Whether this machine compiles for a device; if not, it is said why."""
    reason = why_not(device)
    if reason is not None:
        say(f"compile NOT compiled, this goes on without: {reason}")
        return False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    return True


def why_not(device: torch.device) -> str | None:
    """Why nothing can be compiled here, found out by compiling a line; None if it can."""

    def line(x: Tensor) -> Tensor:
        return x * 2 + 1

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(line)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:  # no compiler, no headers, no Triton, or one that fails
        words = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        remedy = "torch.compile needs a C compiler (gcc or CXX), and Python's headers; on a GPU Triton too"
        return f"{words.strip()[:200]} ({remedy})"
    return None
