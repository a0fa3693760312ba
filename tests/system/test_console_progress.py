"""Progress of work that does not count itself: its share and time left, on a terminal, to a watcher, or not at all."""

from __future__ import annotations

import io
import sys
import time

import pytest

from simpletune.system import console
from simpletune.system.console import Pace, counting, expecting, silence, watch_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_time_left_follows_the_pace_so_far() -> None:
    pace = Pace({"libraries": 4.0, "train": 4.0, "validate": 2.0}, 100.0)
    assert pace.look(102.0) == (pytest.approx(0.2), pytest.approx(8.0))
    assert pace.look(130.0) == (pytest.approx(0.38), pytest.approx(6.2))  # takes longer than usual: nearly done
    pace.begin("train", 112.0)  # three times as slow as usual
    assert pace.look(118.0) == (pytest.approx(0.6), pytest.approx(12.0)) and pace.part == "train"
    pace.begin("validate", 112.1)
    assert pace.look(112.1)[1] == pytest.approx(2 * 12.1 / 8)
    cached = Pace({"libraries": 4.0, "train": 4.0}, 0.0)
    cached.begin("train", 0.0)  # what took no time does not promise that nothing will
    assert cached.look(0.0) == (0.5, pytest.approx(4.0 * console.LEAST_PACE))


def test_a_watcher_hears_the_part_and_a_pipe_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "TICK", 0.01)
    heard: list[tuple[float, str, float]] = []
    with watch_progress(lambda *said: heard.append(said)), silence(), expecting("predict x", {"a": 1, "b": 9}) as begin:
        begin("b")
        while not heard:
            time.sleep(0.01)
    share, part, left = heard[0]
    assert part == "b" and 0.1 <= share < 0.5 and left > 0
    with expecting("predict x", {"a": 1}) as begin:
        begin("a")
        time.sleep(0.05)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("silent", [False, True])
def test_a_terminal_shows_a_bar_unless_silenced_before(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "TICK", 0.01)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with silence() if silent else watch_progress(None), expecting("predict x", {"a": 1, "b": 9}) as begin:  # type: ignore[arg-type]
        with silence():  # as the simulation's own steps are
            begin("b")
            time.sleep(0.3)
    assert ("predict x: b, about" in terminal.getvalue()) is not silent and console._Stage.bars is None


def test_counted_work_says_what_is_left_once_its_share_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PLAIN_EVERY", 0.0)
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    with counting("search", "predictions") as count:
        count("a", 0.0)
        count("b", 0.25)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "search: 1 predictions in 10 s, the last a"
    assert second == "search: 2 predictions in 20 s, about 1 min 0 s left, the last b"
