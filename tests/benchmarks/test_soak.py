"""The long run that is watched: what counts as grown, the table, and a short run of all of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak import Point, Soak, Watched, page_of

FLAT = Point(
    0,
    0.02,
    Watched(560.0, 660.0, 5, 3),
    Watched(76.0, 176.0, 8, 3),
    {"": 40_000, "charts": 40_000},
    10**6,
    125.0,
    600.0,
)


def points(last: Point) -> list[Point]:
    """Twenty, the first larger than the rest, of which the last is given."""
    first = replace(FLAT, train=Watched(900.0, 1000.0, 20, 9), metrics=500.0)
    found = [first, *[FLAT] * 18, last]
    return [replace(point, step=1000 * number) for number, point in enumerate(found, 1)]


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (FLAT, None),
        (replace(FLAT, train=Watched(563.0, 670.0, 5, 3)), None),
        (replace(FLAT, train=Watched(590.0, 660.0, 5, 3)), "memory: from 560.0 to 590.0"),
        (replace(FLAT, train=Watched(560.0, 680.0, 5, 3)), "most memory: from 660.0 to 680.0"),
        (replace(FLAT, web=Watched(76.0, 186.0, 8, 3)), "most web memory: from 176.0 to 186.0"),
        (replace(FLAT, seconds=0.026), "step: from 20.0 to 26.0"),
        (replace(FLAT, train=Watched(560.0, 660.0, 7, 3)), "descriptors: from 5.0 to 7.0"),
        (replace(FLAT, train=Watched(560.0, 660.0, 5, 4)), "threads: from 3.0 to 4.0"),
        (replace(FLAT, web=Watched(90.0, 176.0, 8, 3)), "web memory: from 76.0 to 90.0"),
        (replace(FLAT, web=Watched(76.0, 176.0, 10, 3)), "web descriptors: from 8.0 to 10.0"),
        (replace(FLAT, web=Watched(76.0, 176.0, 8, 5)), "web threads: from 3.0 to 5.0"),
        (replace(FLAT, page={"": 40_000, "charts": 60_000}), "page: from 78.1 to 97.7"),
        (replace(FLAT, report=1_100_000), "report: from 976.6 to 1,074.2"),
        (replace(FLAT, metrics=140.0), "metrics: from 125.0 to 140.0"),
        (replace(FLAT, folder=700.0), "folder: from 600.0 to 700.0"),
    ],
)
def test_what_is_larger_in_the_last_quarter_than_in_the_second_has_grown(last: Point, told: str | None) -> None:
    watched = Soak(Path(), 20_000, points(last))
    assert watched.grown() == ([told] if told else [])
    page = page_of(watched, 0.0)
    assert (told or "Nothing has grown.") in page and "| 20,000 | " in page


def test_what_processes_take_is_compared_within_the_longest_part_of_a_continued_run() -> None:
    smaller = replace(FLAT, train=Watched(500.0, 600.0, 5, 3))
    before, after = [replace(smaller, step=step) for step in range(1, 10)], replace(FLAT, start=9)
    watched = Soak(Path(), 20, before + [replace(after, step=step) for step in range(10, 20)])
    assert watched.grown() == []
    assert "Continued at step 9: processes are compared in the longest part." in page_of(watched, 0.0)
    watched.points[-1] = replace(watched.points[-1], train=Watched(590.0, 660.0, 5, 3), report=1_100_000)
    assert watched.grown() == ["memory: from 560.0 to 590.0", "report: from 976.6 to 1,074.2"]


def test_a_point_is_read_as_it_was_written() -> None:
    assert Point.of(json.loads(json.dumps(asdict(FLAT)))) == FLAT


def test_a_kept_run_of_another_length_is_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "soak.json").write_text('{"train": {"steps": 24}}')
    with pytest.raises(SystemExit):
        soak.main(["--steps", "30", "--folder", str(tmp_path)])
    assert "holds a run of 24 steps, not 30. Use another folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        soak.main(["--minutes", "1"])
    assert "--minutes needs --folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_run_is_watched_from_its_start_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is too short to say what grows."""
    for name, value in {"POINTS": 4, "VALIDATIONS": 4, "PERIOD": 0.2}.items():
        monkeypatch.setattr(soak, name, value)
    words = ["--steps", "24", "--out", str(tmp_path), "--folder", str(tmp_path / "kept")]
    assert soak.main([*words, "--minutes", "0"]) == 1
    assert not (tmp_path / "soak.md").exists()
    assert "at step 0 of 24; the same command continues" in capsys.readouterr().out
    soak.main(words)
    page = (tmp_path / "soak.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| [1-9]", line)]
    assert 1 <= len(rows) <= 4 and all(len(row) == 14 for row in rows)
    for row in rows:
        assert all(float(cell.strip(" |").replace(",", "")) > 0 for cell in row), row


@pytest.mark.slow
def test_a_run_that_fails_ends_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Soak, "write_inputs", lambda self: tmp_path / "missing.json")
    with pytest.raises(RuntimeError, match="the run ended with 2: .*missing.json"):
        Soak(tmp_path, 24).watch()
