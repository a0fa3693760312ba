"""Every test on a card."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fp32_is_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of fp32 in fp32. TF32, which torch lets cuDNN use, rounds them to 10 bits: too coarse to compare with
    the CPU's."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
