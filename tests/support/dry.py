"""Shared by tests under the stub of CUDA (tests/gpu/dry_gpu): its counters, and child processes on another card."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = (75, 80, 86, 89, 90, 120)
WHY_SKIPPED = "needs the stub of CUDA: tests/gpu/dry_gpu/run .venv-cuda/bin/python -m pytest -m dry (make dry)"


def is_loaded() -> bool:
    """Whether this process runs under the stub."""
    return hasattr(ctypes.CDLL(None), "dry_count")


def count(name: str) -> int:
    """How often an entry point was called, or one of the totals of tests/gpu/dry_gpu/counts.c."""
    function = ctypes.CDLL(None).dry_count
    function.restype = ctypes.c_longlong
    return function(name.encode())


def used(device: int = 0) -> int:
    """Bytes that a device holds, as its driver counts them."""
    function = ctypes.CDLL(None).dry_used
    function.restype = ctypes.c_longlong
    return function(device)


@contextmanager
def counted(*names: str) -> Iterator[dict[str, int]]:
    """Count entry points within the context; the counts are there at its end."""
    before = {name: count(name) for name in names}
    counts: dict[str, int] = {}
    yield counts
    counts |= {name: count(name) - before[name] for name in names}


def process(code: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child process, under the stub with other variables: ``process("...", DRY_CC=75)``."""
    env = os.environ | {name: str(value) for name, value in environment.items()}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def printed(code: str, **environment: object) -> str:
    """Run code in a child process and return what it printed."""
    # Without the interpreter's end, where autograd's thread for the device may abort the process ("terminate called
    # without an active exception": 2 of 18 on two busy cores, torch 2.13).
    done = process(f"{code}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
