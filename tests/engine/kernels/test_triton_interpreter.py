"""Every Triton kernel in Triton's interpreter, on the CPU, against float64: on few examples, and on all (slow)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from interpreted_examples import FEW
from launching import Launcher

TESTS = Path(__file__).resolve().parent
FILES = ["interpreted_elementwise.py", "interpreted_kernel.py", "interpreted_updates.py"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# TRITON_INTERPRET must be set before Triton is imported, which the launcher has done: it is imported again.
INTERPRETED = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
    del sys.modules[name]
import pytest
sys.path.insert(0, "tests")
sys.exit(pytest.main(["-q", "-W", "ignore", "--noconftest", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def assert_passes(launcher: Launcher, files: list[str], **environment: str) -> None:
    """Run the tests of ``files`` in a process of their own."""
    words, interpreted = [str(TESTS / file) for file in files], {"TRITON_INTERPRET": "1", **environment}
    outcome = launcher.programs(INTERPRETED, words, environment=interpreted, patience=600)
    assert outcome.codes == [0] and "passed" in outcome.said[0], outcome.said[0][-4000:]


def test_few_examples(launcher: Launcher) -> None:
    assert_passes(launcher, FILES, **{FEW: "6"})


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_all_examples(file: str, launcher: Launcher) -> None:
    assert_passes(launcher, [file])
