"""Calls that order the device's work: found in the source, taken out one at a time, all in README.md beside this."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from softgpu.take_out import Call, calls_of, without
from softgpu.waits import ordering_calls

ROOT = Path(__file__).resolve().parents[3]
SOURCE = """
class Queue:
    def __init__(self, log):
        self.log = log
        self.last = "last"

    def record(self, name):
        self.log.append(name)
        return name

    def work(self):
        def inner():
            return self.record("inner")

        after = [self.record("first"), self.last]
        self.record("second"), self.log.append("kept")
        return inner(), after
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ordered").mkdir()
    (tmp_path / "ordered" / "__init__.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("ordered"), calls_of(tmp_path / "ordered", {"record"}, {"last"})
    del sys.modules["ordered"]


def test_calls_are_found_with_their_function(program) -> None:
    _, calls = program
    assert [(call.function, call.text) for call in calls] == [
        ("Queue.work.<locals>.inner", "self.record('inner')"),
        ("Queue.work", "self.record('first')"),
        ("Queue.work", "self.last"),
        ("Queue.work", "self.record('second')"),
    ]


@pytest.mark.parametrize("number", range(4))
def test_one_call_is_missing_in_the_context_and_there_again_after_it(number: int, program) -> None:
    module, calls = program
    queue = module.Queue([])
    whole = queue.work(), list(queue.log)
    queue.log.clear()
    with without(calls[number]):
        found = queue.work(), list(queue.log)
    expected = {
        0: ((None, ["first", "last"]), ["first", "second", "kept"]),
        1: (("inner", [None, "last"]), ["second", "kept", "inner"]),
        2: (("inner", ["first", None]), ["first", "second", "kept", "inner"]),
        3: (("inner", ["first", "last"]), ["first", "kept", "inner"]),
    }
    assert found == expected[number] != whole
    queue.log.clear()
    assert (queue.work(), list(queue.log)) == whole


def test_every_call_of_the_package_is_in_the_page_and_can_be_taken_out() -> None:
    page = Path(__file__).with_name("README.md").read_text()
    calls = ordering_calls()
    assert len(calls) > 20

    def row(call: Call) -> str:
        return f"| `{call.text}` | `{call.module.removeprefix('simpletune.')}`, `{call.function}` |"

    assert [row(call) for call in calls if row(call) not in page] == []
    for call in calls:
        with without(call):
            pass
