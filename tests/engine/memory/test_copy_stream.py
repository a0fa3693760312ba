"""Host memory for copies: what the system is told of its pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fresh_caches import uncalled
from torch import Tensor

from simpletune.engine.memory import copy_stream
from simpletune.engine.memory.copy_stream import PinnedPages, copy_to_pinned, host_bytes

SIZE = 4 * 2**20
HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the pages at an address: ``dc`` are not copied to a fork, ``hg`` may be huge."""
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
        first, _, last = area.partition(" ")[0].partition("-")
        if first and int(first, 16) <= address < int(last, 16):
            return set(area.rpartition("VmFlags:")[2].split())
    raise AssertionError(f"no pages at {address:x}")


def test_pinned_pages_stay_out_of_forks_and_may_be_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedPages, "pin", lambda *_: None)
    buffer = host_bytes(SIZE, torch.device("cuda"))
    found = flags_of(buffer.data_ptr())
    assert "dc" in found and ("hg" in found or not HUGE.exists())


def test_memory_that_cannot_be_pinned_is_pageable_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nMore.")

    monkeypatch.setattr(PinnedPages, "pin", fail)
    monkeypatch.setattr(Tensor, "pin_memory", fail)
    monkeypatch.setattr(copy_stream, "_say_not_pinned", uncalled(copy_stream._say_not_pinned))
    for _ in range(2):
        assert host_bytes(SIZE, torch.device("cuda")).fill_(1).numel() == SIZE
        assert torch.equal(copy_to_pinned(torch.ones(3)), torch.ones(3))
    assert capsys.readouterr().out.splitlines() == [
        "warning host memory cannot be pinned, so copies no longer overlap with the computation "
        "(CUDA error: out of memory)"
    ]
