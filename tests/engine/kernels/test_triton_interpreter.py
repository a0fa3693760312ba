"""Every Triton kernel in Triton's interpreter, on the CPU, against float64: on few examples, and on all (slow)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted_examples import FEW

TESTS = Path(__file__).resolve().parent
FILES = ["interpreted_elementwise.py", "interpreted_kernel.py", "interpreted_updates.py"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def assert_passes(files: list[str], **environment: str) -> None:
    """Run the tests of ``files`` in a process of their own: TRITON_INTERPRET must be set before Triton is imported.

    They use nothing of ``conftest.py``, which imports the whole package.
    """
    path = os.pathsep.join([str(TESTS.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])  # for ``reference``
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    words = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *files]
    done = subprocess.run(words, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_few_examples() -> None:
    assert_passes(FILES, **{FEW: "6"})


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_all_examples(file: str) -> None:
    assert_passes([file])
