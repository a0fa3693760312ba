"""What a person sees of training: live in a terminal, plain elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from simpletune.apps.cli import main
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import read_metrics
from simpletune.system import console as terminal
from simpletune.system.console import TrainingProgress, detail, progress, say

ROOT = str(Path(__file__).resolve().parents[3])
TRAINING = """
import sys, warnings
from simpletune.system import console
from simpletune.system.console import TrainingProgress, say
console.LIVE_EVERY = console.PLAIN_EVERY = 0.0
with TrainingProgress(30, 0, 8, lambda: "0.61 GiB RAM", {"validate": 10, "save": None}, {"validate": 2.0}) as line:
    for step in range(1, 31):
        line.update(step, 1.0 / step, 0.5)
        if step == 4:
            say("notice [bold]" + 70 * " of many words")
            warnings.warn("not ours")
        if step == int(sys.argv[1]):
            raise SystemExit
print("after")
"""
NESTED = """
import sys
from simpletune.system import console
console.LIVE_EVERY = 0.0
with console.progress("outer", 3, "prompts") as outer:
    outer()
    with console.progress("inner [x]", 3, "layers") as inner:
        inner()
        outer()
"""
HELD = """
import sys
from simpletune.system.console import progress
with progress("outer", 10**9, "prompts") as advance:
    while True:
        advance()
"""


def start(code: str, columns: int, stop: int = 0, term: str = "xterm", errors: int | None = None):
    """A process with its output in a terminal of so many columns, and that terminal."""
    handle, end = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": term, "PYTHONPATH": ROOT, "NO_COLOR": "1"}
    command = [sys.executable, "-c", code, str(stop)]
    child = subprocess.Popen(command, stdout=end, stderr=end if errors is None else errors, env=environment)
    os.close(end)
    return child, handle


def in_a_terminal(code: str, columns: int, **how: Any) -> str:
    """What a terminal of so many columns receives."""
    child, handle = start(code, columns, **how)
    received = b""
    with suppress(OSError):  # the terminal's other end was closed
        while more := os.read(handle, 4096):
            received += more
    os.close(handle)
    assert child.wait(timeout=60) == 0
    return received.decode()


def shown(text: str) -> str:
    """What is left to read in the terminal."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[\??\d*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part not in ("\r", "\x1b[?25l", "\x1b[?25h"):
            lines[row] += part
    return "\n".join(lines)


def test_a_terminal_has_a_bar_that_is_drawn_again_below_other_words_and_whose_last_line_stays() -> None:
    text = in_a_terminal(TRAINING, 140)
    drawn = [part for part in text.split("\r\x1b[2K") if " train   step" in part]
    assert len(drawn) >= 30
    first = next(part for part in drawn if " 3/30" in part)
    for words in ("loss ", "0.5 s/step", "16 samples/s", "0.61 GiB RAM", " left", "pictures at 10"):
        assert words in first
    assert "pictures at 20" in next(part for part in drawn if "step 12/30" in part)
    assert [max(part.count("\u2501") for part in drawn if f"step {n}/30" in part) for n in (15, 30)] == [6, 12]
    lines = shown(text).splitlines()
    assert lines[0] == "notice [bold]" + 70 * " of many words"  # in one piece: the terminal wraps it
    assert "UserWarning: not ours" in lines[1]
    assert lines[2:] == ["train   step 30/30  loss 0.1003  0.5 s/step  16 samples/s  0.61 GiB RAM", "after"]


def test_the_line_is_ended_when_training_stops_and_what_goes_to_a_file_still_does(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        text = in_a_terminal(TRAINING, 140, stop=7, errors=errors.fileno())
    assert "not ours" in (tmp_path / "errors").read_text() and "not ours" not in text
    assert shown(text).splitlines()[-1].startswith("train   step  7/30  loss ")


def test_a_narrow_terminal_never_wraps() -> None:
    text = in_a_terminal(TRAINING, 50)
    assert "\x1b[1A" not in text  # a bar of two lines would go up a line each time it is drawn
    drawn = re.split(r"\r\x1b\[2K|\r\n", text)
    bars = [part for part in drawn if " train   step" in part]
    assert len(bars) >= 30 and max(len(re.sub(r"\x1b\[\S+?[a-zA-Z]", "", part)) for part in bars) == 50
    assert all("loss" in part for part in bars)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (80, "train   step  3/30  loss .* 0.5 s/step  20 s left  0.61 GiB RAM"),
        (62, "train   step  3/30  loss .* 0.5 s/step  20 s left"),
        (40, "train   step  3/30  20 s left"),
    ],
)
def test_a_narrow_terminal_leaves_out_whole_parts(
    columns: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The least important first; a cut one would say nothing."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(terminal, "LIVE_EVERY", 0.0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    line = TrainingProgress(30, 0, 8, lambda: "0.61 GiB RAM", {"validate": 10, "save": None}, {"validate": 2.0})
    for step in range(1, 4):
        line.update(step, 1.0 / step, 0.5)
    shown_now = line._stage._line
    line._stage.end()
    assert re.fullmatch(words, shown_now) and len(shown_now) + terminal.bar_width() + 1 <= columns


def test_bars_of_nested_stages_are_all_taken_away() -> None:
    text = in_a_terminal(NESTED, 100)
    assert re.search(r"outer: 1/3 prompts.*\n.*inner \[x\]: 1/3 layers", text)
    lines = shown(text).splitlines()
    assert len(lines) == 2 and lines[0].startswith("inner [x]: 1 layer in ")
    assert lines[1].startswith("outer: 2 prompts in ")


def test_a_killed_process_leaves_the_cursor() -> None:
    child, handle = start(HELD, 100)
    received = b""
    while b"outer: " not in received:
        received += os.read(handle, 4096)
    child.kill()
    child.wait()
    os.close(handle)
    assert received.rfind(b"\x1b[?25h") > received.rfind(b"\x1b[?25l") >= 0


def test_rich_is_imported_for_a_bar_only_and_a_terminal_that_cannot_draw_gets_plain_lines() -> None:
    code = TRAINING + "print([name for name in sys.modules if name.partition('.')[0] == 'rich'])"
    text = in_a_terminal(code, 140, term="dumb")
    assert "\x1b" not in text and "train   step  3/30  loss " in text
    done = subprocess.run([sys.executable, "-c", code, "0"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("after\n[]\n")


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
    assert line.seconds_left(0, 1.0) == 100 + 4 * 10 + 2 * 4
    assert line.seconds_left(25, 1.0) == 75 + 3 * 10 + 2 * 4
    assert line.seconds_left(99, 1.0) == 1 + 10 + 4


def test_the_pace_is_of_recent_steps_without_warm_up(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PLAIN_EVERY", 0.0)
    line = TrainingProgress(100, 0)
    for step in range(1, 31):
        line.update(step, 1.0, 50.0 if step <= 2 else 0.5 if step < 15 else 0.25)
    lines = capsys.readouterr().out.splitlines()
    assert "0.5 s/step" in lines[2] and "50" in lines[1]
    assert "0.275 s/step" not in lines[-1] and "0.3 s/step" in lines[-1]


def test_details_are_shown_if_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the command's own run alone."""
    monkeypatch.setitem(main.VERBS, "train", (lambda args: detail("attend  with a kernel"), main.VERBS["train"][1]))
    for words, text in ((["--verbose"], "attend  with a kernel\n"), ([], "")):
        assert main.main(["train", "demo", *words]) == 0
        assert capsys.readouterr().out == text


def test_the_watcher_is_told_what_is_done_when_it_begins_now_and_then_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 0.5, 1.0, 1.5, 2.5, 3.0])
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: next(clock))
    told: list[str] = []
    with terminal.watch_work(told.append):
        with progress("drawing", 4, "pictures", detail) as advance:
            for _ in range(4):
                advance()
        with terminal.working("saving"):
            pass
    assert told == ["drawing", "drawing 3 of 4 pictures", "drawing 4 of 4 pictures", "", "saving", ""]


def test_metrics_can_be_read_after_every_step_and_what_is_done_beside_them_is_recorded(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints what a person needs: no word of kernels, and what to do next."""
    tiny_config["validation"] = {"prompts": ["a dog"], "steps": 1, "guidance": 1, "loss_samples": 2}
    tiny_config["output"]["report"] = True
    from simpletune.config.load import validate
    from simpletune.training.train import train

    seen: list[int] = []
    config = validate(tiny_config, "test")
    folder = Path(config.output.runs) / config.name

    class Watching(TrainingProgress):
        def update(self, step: int, loss: float, seconds: float) -> None:
            seen.append(len(read_metrics(folder)))

    monkeypatch.setattr("simpletune.training.trainer.TrainingProgress", Watching)
    recorded: list[str] = []

    def note_work(self: AttemptRecorder, words: str) -> None:
        update(self, words)
        recorded.append(json.loads((folder / "attempts.json").read_text())[-1]["doing"] if self.all else "")

    update = AttemptRecorder.note_work
    monkeypatch.setattr(AttemptRecorder, "note_work", note_work)
    monkeypatch.setattr(terminal, "TELL_EVERY", 0.0)
    train(config)
    assert seen == [1, 2, 3, 4]
    assert "drawing 1 of 1 picture" in recorded and any(words.startswith("evaluating 2 of ") for words in recorded)
    found = [words for words in recorded if words and " of " not in words]
    first, last = found.index("evaluating"), len(found) - 1 - found[::-1].index("evaluating")
    assert found[first + 1] == "drawing" and found[last - 1 :] == [
        "saving the result",
        "evaluating",
        "drawing",
        "writing the report",
    ]
    text = capsys.readouterr().out
    for words in ("attend", "threads", "bucket", "forward passes", "prompts in", "evaluating", "drawing:"):
        assert words not in text
    compare, draw = text.splitlines()[-2:]
    assert compare.endswith(f"simpletune compare --run {folder}")
    assert draw.endswith(f"simpletune generate --run {folder} --prompt 'a dog'")


def test_progress_is_told_now_and_then_and_counts_one_in_the_singular(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, *(100.0 + 4 * done for done in range(1, 7)), 124.0, 124.0, 125.0, 126.0])
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: next(clock))
    for count in (6, 1):
        with progress("text", count, "prompts") as advance:
            for _ in range(count):
                advance()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["text: 3/6 prompts, 0.2/s, 12 s left", "text: 6 prompts in 24.0 s", "text: 1 prompt in 2.0 s"]


def test_of_several_processes_the_first_tells(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    say("hello")
    TrainingProgress(1, 0).update(1, 0.5, 1.0)
    assert capsys.readouterr().out == ""
