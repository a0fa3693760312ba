"""Checksums of a run's figures."""

import tracemalloc
from pathlib import Path

import pytest

from simpletune.runs.figure_sums import figure_sums, require_figures


def test_long_rows_are_not_read_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """24 MiB of rows; one appended later changes nothing, one changed does."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"{}\n" * 2**23)
    tracemalloc.start()
    sums = figure_sums(tmp_path)
    with open(file, "ab") as handle:
        handle.write(b"{}\n")
    require_figures(tmp_path, sums)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000 and capsys.readouterr().out == ""
    tracemalloc.stop()
    file.write_bytes(b"[]\n" + file.read_bytes()[3:])
    require_figures(tmp_path, sums)
    assert "metrics.jsonl has changed since it was written" in capsys.readouterr().out
