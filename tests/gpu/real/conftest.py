"""Every test on a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fp32_is_fp32() -> Iterator[None]:
    """Products of fp32 in fp32. TF32, which torch lets cuDNN use, rounds them to 10 bits: too coarse to compare with
    the CPU's."""
    flags = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [each.allow_tf32 for each in flags]
    for each in flags:
        each.allow_tf32 = False
    yield
    for each, allowed in zip(flags, before, strict=True):
        each.allow_tf32 = allowed
