"""``torch.compile``, block by block, where the machine can do it; where it cannot, that is said."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from simpletune.terminal import say


def compile_blocks(transformer: nn.Module, device: torch.device) -> bool:
    """Compile each block of a transformer, in place: blocks of equal structure share what is compiled.

    Args:
        transformer: whose blocks have their passes already.
        device: where it runs.

    Returns:
        Whether they are compiled.
    """
    reason = why_not(device)
    if reason is not None:
        say(f"compile NOT compiled, this goes on without: {reason}")
        return False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for block in transformer.transformer_blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False)
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
