"""The figure of docs/images shows what the stored predictions say."""

from __future__ import annotations

import html
import re

import pytest

from benchmarks import stage_peaks
from simpletune.engine.memory import cuda_libraries
from simpletune.system.gpus import GIB, find_card


def test_the_figure_shows_the_stored_predictions_and_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn again by ``make pictures``, after ``make predictions``; with the torch that these are stored for."""
    monkeypatch.setattr(cuda_libraries, "frees_workspaces", lambda: False)
    drawn = html.unescape(stage_peaks.IMAGE.read_text(encoding="utf-8"))
    bars = re.findall(r'aria-label="[^":]*: ([\d.]+); configuration: ([^;]*); stage: ([^;"]*)"', drawn)
    found = [{"configuration": title, "stage": stage, "GiB": float(size)} for size, title, stage in bars]
    assert found == stage_peaks.needs() and len(found) == 4 * len(stage_peaks.SHOWN)
    lines = re.findall(r'<line aria-label="[^":]*: ([\d.]+)"', drawn)
    assert list(map(float, lines)) == [round(find_card(name).bytes / GIB, 2) for name in stage_peaks.CARDS.values()]
