"""What a person sees of training: live in a terminal, plain elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simpletune.runs.folder import read_metrics
from simpletune.system import console as terminal
from simpletune.system.console import TrainingProgress, progress, say

CODE = """
import sys
from simpletune.terminal import TrainingLine, say
with TrainingLine(30, 0, 8, lambda: "0.61 GiB RAM", {"validate": 10, "save": None}, {"validate": 2.0}) as line:
    for step in range(1, 31):
        line._last = 0
        line.update(step, 1.0 / step, 0.5)
        if step == 4:
            say("warning something")
        if step == int(sys.argv[1]):
            raise SystemExit
"""


def in_a_terminal(tmp_path: Path, columns: int, stop: int = 0) -> str:
    """What a terminal of so many columns receives."""
    file = tmp_path / "line.py"
    file.write_text(CODE)
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONPATH": root}
    handle, end = pty.openpty()
    child = subprocess.Popen([sys.executable, str(file), str(stop)], stdout=end, stderr=end, env=environment)
    os.close(end)
    received = b""
    while True:
        try:
            more = os.read(handle, 4096)
        except OSError:  # the terminal's other end was closed
            break
        if not more:
            break
        received += more
    os.close(handle)
    assert child.wait(timeout=60) == 0
    return received.decode()


def test_a_terminal_has_one_line_that_is_drawn_again(tmp_path: Path) -> None:
    text = in_a_terminal(tmp_path, 140)
    drawn = text.split("\r\x1b[2K")
    assert len(drawn) > 30
    first = next(part for part in drawn if " 3/30" in part)
    for words in ("loss ", "0.5 s/step", "16 samples/s", "0.61 GiB RAM", " left", "pictures at 10"):
        assert words in first
    assert "pictures at 20" in next(part for part in drawn if "step 12/30" in part)
    # Other words take the line away first, and the last line is ended.
    assert "\r\x1b[2Kwarning something\r\n" in text
    assert text.endswith("\r\n") and text.count("\n") == 2


def test_a_narrow_terminal_never_wraps(tmp_path: Path) -> None:
    drawn = re.split(r"\r\x1b\[2K|\r\n", in_a_terminal(tmp_path, 50))
    assert max(len(part) for part in drawn) < 50
    assert any("s/step" in part for part in drawn)


def test_the_line_is_ended_when_training_stops(tmp_path: Path) -> None:
    assert in_a_terminal(tmp_path, 140, stop=7).endswith("\r\n")


def test_elsewhere_lines_are_plain_and_few(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(second) for second in range(1, 1000))
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: next(clock))
    with TrainingProgress(40, 0, 4, lambda: "1.00 GiB GPU", {"validate": None, "save": 10}) as line:
        for step in range(1, 41):
            line.update(step, 0.5, 1.0)
        say("done")
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "\x1b" not in text and "\r" not in text
    assert 4 <= len(lines) <= 7 and lines[-1] == "done"
    assert lines[-2] == "train   step 40/40  loss 0.5000  1 s/step  4 samples/s  1.00 GiB GPU"


def test_time_left_counts_what_interrupts_training() -> None:
    line = TrainingProgress(100, 0, every={"validate": 25, "save": 50}, took={"validate": 10.0, "save": 4.0})
    # Pictures at 25, 50, 75 and at the end; saved at 50 and at the end.
    assert line.left(0, 1.0) == 100 + 4 * 10 + 2 * 4
    assert line.left(25, 1.0) == 75 + 3 * 10 + 2 * 4
    assert line.left(99, 1.0) == 1 + 10 + 4


def test_the_pace_is_of_recent_steps_without_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    line = TrainingProgress(100, 0)
    for step in range(1, 31):
        line._last = 0.0
        line.update(step, 1.0, 50.0 if step <= 2 else 0.5 if step < 15 else 0.25)
    lines = capsys.readouterr().out.splitlines()
    assert "0.5 s/step" in lines[2] and "50" in lines[1]
    assert "0.275 s/step" not in lines[-1] and "0.3 s/step" in lines[-1]


def test_metrics_can_be_read_after_every_step(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from simpletune.config.load import validate
    from simpletune.training.loop import train

    seen: list[int] = []
    config = validate(tiny_config, "test")
    folder = Path(config.output.runs) / config.name

    class Watching(TrainingProgress):
        def update(self, step: int, loss: float, seconds: float) -> None:
            seen.append(len(read_metrics(folder)))

    monkeypatch.setattr("simpletune.training.loop.TrainingProgress", Watching)
    train(config)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("live", [False, True])
def test_progress_is_told_now_and_then(live: bool, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, *(100.0 + 4 * done for done in range(1, 7)), 124.0])
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("sys.stdout.isatty", lambda: live)
    with progress("text", 6, "prompts") as advance:
        for _ in range(6):
            advance()
    text = capsys.readouterr().out
    if live:
        assert text.count("\r\x1b[2K") == 6 and "\r\x1b[2Ktext: 1/6 prompts, 0.2/s, 20 s left" in text
    else:
        assert text.splitlines()[0] == "text: 3/6 prompts, 0.2/s, 12 s left" and "\x1b" not in text
    assert text.endswith("text: 6 prompts in 24.0 s\n") and text.count("\n") == 2 - live
