"""Adaptive norms, gates and residuals as single operators: diffusers' bits on the CPU, float64 in the kernels."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.models.attention import JointTransformerBlock
from torch import Tensor, nn

from simpletune.families.sd3.joint_block import JointBlock, use_joint_blocks

TESTS = Path(__file__).resolve().parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = {
    "plain": {}, "last": {"context_pre_only": True}, "norms of q and k": {"qk_norm": "rms_norm"},
    "dual": {"qk_norm": "rms_norm", "use_dual_attention": True},
    "dual and last": {"context_pre_only": True, "use_dual_attention": True},
}  # fmt: skip
TRAINED = {"all": ".", "attention": "attn.to_", "modulation of the text": "norm1_context.linear.weight"}
Block = Callable[..., tuple[Tensor | None, Tensor]]


@needs_triton
@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "interpreted_elementwise.py",
    ]
    done = subprocess.run(words, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def blocks(kind: str, trained: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """diffusers' block and ours, with the same weights."""
    torch.manual_seed(0)
    theirs = JointTransformerBlock(32, 2, 16, **KINDS[kind]).to(dtype)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(TRAINED[trained] in name)
    ours = copy.deepcopy(theirs)
    use_joint_blocks([ours])
    return theirs, ours


def inputs(dtype: torch.dtype, gradient: bool, samples: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (samples, 12, 32), (samples, 5, 32), (samples, 32)
    made = [(torch.randn(shape, generator=generator) * 2).to(dtype) for shape in shapes]
    return [*(each.requires_grad_(gradient) for each in made[:2]), made[2]]


def results(block: nn.Module, run: Block, given: list[Tensor]) -> list[Tensor | None]:
    """Outputs, and gradients of inputs and weights."""
    given = [each.detach().clone().requires_grad_(each.requires_grad) for each in given]
    text, image = run(*given)
    generator = torch.Generator().manual_seed(2)
    outputs = [each for each in (image, text) if each is not None]
    loss = sum((each.float() * torch.randn(each.shape, generator=generator)).sum() for each in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*outputs, *(each.grad for each in given), *(each.grad for each in block.parameters())]


def assert_same_bits(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None and b is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_has_diffusers_bits_on_the_cpu(kind: str, trained: str, dtype: torch.dtype) -> None:
    theirs, ours = blocks(kind, trained, dtype)
    assert isinstance(ours, JointBlock)
    for gradient in (True, False):
        given = inputs(dtype, gradient)
        assert_same_bits(results(ours, ours, given), results(theirs, theirs, given))
    with torch.no_grad():
        assert_same_bits(list(ours(*given)), list(theirs(*given)))


def test_under_autocast_a_block_is_diffusers() -> None:
    theirs, ours = blocks("dual", "all", torch.float32)
    given = inputs(torch.float32, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(results(ours, ours, given), results(theirs, theirs, given))
