"""The figures of a card: what nvidia-smi says, at most every period, and one that hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from simpletune.system import card_load
from simpletune.system.card_load import CardLoad, CardMeter, parse_load


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up nvidia-smi that counts how often it is asked."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def write(file: Path, lines: str) -> None:
    file.write_text(f"#!/bin/sh\necho x >> {file}.asked\n{lines}\n")
    file.chmod(0o755)


def test_a_line_is_read_with_whatever_the_card_reports() -> None:
    assert parse_load("NVIDIA RTX 3070, 7091, 8192, 97, 215.50, 220.00, 71") == CardLoad(
        "NVIDIA RTX 3070", 7091, 8192, 97, 215.5, 220, 71
    )
    found = parse_load("Odd, name, 7091, 8192, [N/A], [Not Supported], 220.00, 71")
    assert found == CardLoad("Odd, name", 7091, 8192, None, None, 220, 71)
    assert parse_load("NVIDIA-SMI has failed") is None


def test_it_is_asked_once_a_period(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(smi, "echo 'A, 1, 2, 3, 4, 5, 6'; echo 'B, 1, 2, 3, 4, 5, 6'")
    meter = CardMeter()
    assert [card.name for card in meter.read(30)] == ["A", "B"] == [card.name for card in meter.read(30)]
    assert Path(f"{smi}.asked").read_text() == "x\n"
    monkeypatch.setattr(card_load, "PERIOD", 0.0)
    write(smi, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert meter.read(30) == []
    assert Path(f"{smi}.asked").read_text() == "x\nx\n"
    smi.unlink()
    monkeypatch.setattr(card_load, "STALE", 0.0)
    assert meter.read(30) == ()


def test_one_that_hangs_holds_nobody_up(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_load, "PERIOD", 0.0)
    write(smi, "exec sleep 60")
    monkeypatch.setattr(card_load, "SECONDS", 1.0)
    meter, begun = CardMeter(), time.monotonic()
    assert meter.read(0.05) == () == meter.read(0.05)
    assert time.monotonic() - begun < 0.9
    assert meter._thread is not None
    meter._thread.join(30)
    assert Path(f"{smi}.asked").read_text() == "x\n"  # the second look did not ask again
