"""The short version of ``make torture``: a few kills of forked children, in one process without threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family",
    [[family, *mode] for mode in ([], ["--slider"]) for family in ("sd3", "sdxl", "klein", "zimage", "qwen_image")],
    ids=" ".join,
)
@pytest.mark.slow  # test_interruptions.py fails a run at each kind of moment, test_together.py kills one of two
def test_killed_runs_end_like_unkilled_ones(family: list[str]) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{TESTS.parent.parent}:{TESTS.parent / 'support'}",
    }
    command = [sys.executable, str(TESTS / "torture.py"), "--kills", "4", "--whole", "0", "--family", *family]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    survived = re.search(r"kills survived +(\d+)", done.stdout)
    assert survived and int(survived[1]) >= 4
