"""Published peaks of memory: every row is a valid job, and the committed predictions are today's and lower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peaks
from benchmarks.memory import SM_89
from simpletune.estimate.simulate.simulate import simulate

COMMITTED = json.loads((Path(peaks.__file__).parent / "results" / "cpu" / "peaks.json").read_text())["rows"]


def test_every_row_is_committed_and_takes_less_than_was_published() -> None:
    assert list(COMMITTED) == list(peaks.ROWS) and len(COMMITTED) == 21
    for name, row in peaks.ROWS.items():
        assert row.read().train.batch_size == (3 if "SD3.5 Medium" in name else 1)
        found = COMMITTED[name]
        assert found["predicted_gib"] < found["published_gib"] == row.published
        assert ("plain_gib" in found) == row.has_plain


def test_diffusers_with_peft_explains_the_checkpointed_rows() -> None:
    for name in ("SD3.5 Medium, bf16, all checkpointed", "SD 1.x, bf16, checkpointed"):
        row = COMMITTED[name]
        assert row["plain_fp32_gib"] == pytest.approx(row["published_gib"], rel=0.02)


@pytest.mark.parametrize("name", ["SD 1.x, bf16, checkpointed"])
def test_a_committed_prediction_is_today_s(name: str) -> None:
    peak = simulate(peaks.ROWS[name].read(), capability=SM_89).peak
    assert round(peak.bytes / peaks.GIB, 2) == COMMITTED[name]["predicted_gib"]


@pytest.mark.dry
def test_the_row_of_diffusers_runs_on_a_simulated_card() -> None:
    name = "SD 1.x, bf16, checkpointed"
    command = [sys.executable, "-m", "benchmarks.peaks", name, "false"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"DRY_GIB": "44"}, check=True)
    peak = json.loads(done.stdout.splitlines()[-1])["bytes"]
    assert round(peak / peaks.GIB, 2) == COMMITTED[name]["plain_gib"]
