"""Checksums of a run's figures."""

import subprocess
import sys
from pathlib import Path

import pytest

from simpletune.runs.figure_sums import figure_sums, require_figures

PEAK = """
import sys, tracemalloc
from pathlib import Path
from simpletune.runs.figure_sums import figure_sums, require_figures
folder = Path(sys.argv[1])
tracemalloc.start()
sums = figure_sums(folder)
with open(folder / "metrics.jsonl", "ab") as handle:
    handle.write(b"{}\\n")
require_figures(folder, sums)
print(tracemalloc.get_traced_memory()[1])
"""


def test_long_rows_are_not_read_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """24 MiB of rows; one appended later changes nothing, one changed does."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"{}\n" * 2**23)
    # In a process of its own: threads that other tests leave, such as uploads tried again, allocate here, too.
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4_000_000, "nothing else is printed"
    sums = figure_sums(tmp_path)
    with open(file, "ab") as handle:
        handle.write(b"{}\n")
    require_figures(tmp_path, sums)
    assert capsys.readouterr().out == ""
    file.write_bytes(b"[]\n" + file.read_bytes()[3:])
    require_figures(tmp_path, sums)
    assert "metrics.jsonl has changed since it was written" in capsys.readouterr().out
