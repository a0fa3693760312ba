"""Steps measured on an H100, predicted again: what a launch cost there, and which rows count."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import h100
from benchmarks.h100 import ALONE, CARD, CARD_OF_RUNS, LAUNCHES, TWINS, is_ours, launch_of, measured_rows, run
from simpletune.estimate.timing.sections import COMPUTE, KernelWork, StreamWork

FOLDER = Path(h100.__file__).parent / "results" / "gpu-h100"


def queueing(launches: int) -> list[StreamWork]:
    """A step that the host bounds: 10 ms of Python, and launches."""
    work = Counter({KernelWork("add", "bf16", (1,)): launches})
    return [StreamWork(COMPUTE, "", "", work=work, host=Counter(function=1000))]


def test_a_launch_s_seconds_are_those_with_which_the_row_is_predicted() -> None:
    for launch in (30e-6, 5e-6):
        whole = h100.step_with(queueing(1000), launch).seconds
        assert launch_of(queueing(1000), whole, CARD) == pytest.approx(launch, rel=1e-3)


def test_named_and_disturbed_rows_are_those_of_the_committed_ones() -> None:
    rows = {name: row for name, row in measured_rows(FOLDER).items() if is_ours(row)}
    assert len(rows) == 26 and {*LAUNCHES, *TWINS, *TWINS.values()} <= set(rows)
    assert all(rows[name]["least"] > 1.2 * rows[twin]["least"] for name, twin in TWINS.items())


def test_the_table_counts_neither_the_rows_that_tell_the_launch_nor_disturbed_ones_as_calm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(seconds: float, *overrides: str) -> dict:
        return {"seconds": 1.1 * seconds, "least": seconds, "overrides": [*overrides]}

    monkeypatch.setattr(h100, "recorded", lambda overrides: queueing(int(overrides[0])))
    first, second = (row(h100.step_with(queueing(count), 20e-6).seconds, str(count)) for count in (5000, 9000))
    rows = {
        LAUNCHES[0]: first, LAUNCHES[1]: second, "SD3 LoRA int8": row(9.0, "7000"), "as predicted": row(0.15, "7000"),
        "compiled": row(1.0, "1", "speed.compile=true"), "diffusers": {"overrides": "LoRA"},
    }  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps({"seconds": {"rows": rows}}))
    monkeypatch.setattr(h100, "recorded_run", lambda name: queueing(6000))
    seconds = {name: h100.step_with(queueing(6000), 31e-6, CARD_OF_RUNS).seconds for name in ALONE}
    seconds |= {"shared": 1.2 * seconds[ALONE[0]], "shared more": 1.3 * seconds[ALONE[0]]}
    runs = [{"configuration": name, "seconds_measured": each} for name, each in seconds.items()]
    (tmp_path / "runs.json").write_text(json.dumps({"runs": runs}))
    text = run(tmp_path, 1.0).read_text()
    assert "launches took 31.0 us" in text and "which shared it, 1 are within 25%" in text
    assert text.count("shared the card") == text.partition("## Whole runs on an H200")[2].count("shared the card") == 2
    assert "with launches of 20.0 us" in text and "**1 of 2 rows are within 25% of the least** (0 by" in text
    assert "of the 1 that\nnothing is known to have disturbed, 1." in text
    assert "diffusers" not in text.partition("|")[2] and "compiled" not in text.partition("|")[2]
    assert "disturbed: *SD3 LoRA int8, plan* queues as much" in text
