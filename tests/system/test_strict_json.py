"""``strict_json``: what it refuses, where it says so, and that large texts take no longer for it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletune.system.strict_json import MAX_BYTES, MAX_DEPTH, MAX_VALUES, JsonError, parse, read

INTEGERS = st.integers(-(2**63), 2**63 - 1)
LEAVES = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(VALUES)
def test_strict_json_is_read_as_json_reads_it(value: object) -> None:
    text = json.dumps(value)
    assert parse(text) == parse(text.encode()) == value


@pytest.mark.parametrize(
    "text, message, place",
    [
        ('{"a": 1,\n "b": }', "Expecting value", (2, 7)),
        ("", "Expecting value", (1, 1)),
        ("1 2", "Extra data", (1, 3)),
        ('{"a": {"b": 1, "b": 2}}', 'the key "b" appears twice in one object. Keep one of them', (0, 0)),
        ('[{"a": 1, "\\u0061": 2}]', 'the key "a" appears twice', (0, 0)),
        ("[NaN]", "NaN is not a JSON number. Write a finite number", (0, 0)),
        ("-Infinity", "-Infinity is not a JSON number", (0, 0)),
        ("9" * 5000, "... (5,000 digits) does not fit in 64 bits", (0, 0)),
        (f"[{2**63}]", "9223372036854775808 does not fit in 64 bits", (0, 0)),
        (f"[{-(2**63) - 1}]", "-9223372036854775809 does not fit in 64 bits", (0, 0)),
        ('{"lr": 1e400}', "1e400 does not fit in 64 bits. Write a number below 1.8e308", (0, 0)),
        ("[-1e400]", "-1e400 does not fit in 64 bits", (0, 0)),
        (" " * (MAX_BYTES + 1), f"it has {MAX_BYTES + 1:,} bytes. Use at most {MAX_BYTES:,}", (0, 0)),
        ("[" + "0," * MAX_VALUES + "0]", f"it holds more than {MAX_VALUES:,} values", (0, 0)),
        (json.dumps([{"a": 0}] * (MAX_VALUES // 2)), f"it holds more than {MAX_VALUES:,} values", (0, 0)),
        (b"\xff", "it is not UTF-8", (0, 0)),
        ("[" * 100_000, f"it is nested too deeply. Use at most {MAX_DEPTH} levels", (0, 0)),
    ],
)
def test_what_is_not_strict_json(text: str | bytes, message: str, place: tuple[int, int]) -> None:
    with pytest.raises(JsonError, match=re.escape(message)) as caught:
        parse(text)
    assert (caught.value.line, caught.value.column) == place


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
def test_depth(opening: str, closing: str) -> None:
    parse(opening * MAX_DEPTH + "1" + closing * MAX_DEPTH)
    for text in (opening * (MAX_DEPTH + 1) + "1" + closing * (MAX_DEPTH + 1), f"[1, {opening * 64}1{closing * 64}]"):
        with pytest.raises(JsonError, match="nested too deeply"):
            parse(text)


def test_a_duplicate_among_many_keys_is_found_in_linear_time() -> None:
    keys = ",".join(f'"{number}":0' for number in range(100_000))
    clock = time.process_time()
    with pytest.raises(JsonError, match='"last" appears twice'):
        parse(f'{{{keys},"last":0,"last":0}}', max_bytes=2**24)
    assert time.process_time() - clock < 60  # seconds; quadratic takes many minutes


def test_the_largest_that_is_read() -> None:
    assert parse('["' + "[{" * 100 + '"]') == ["[{" * 100], "brackets in text and beside each other are not depth"
    assert parse("[" + "[]," * 100 + "[]]") == [[]] * 101
    assert parse(json.dumps([0] * (MAX_VALUES - 1))) == [0] * (MAX_VALUES - 1)
    assert parse(json.dumps(["a,b[{" * 20_000])) == ["a,b[{" * 20_000]
    assert parse(f"[{2**63 - 1}, {-(2**63)}, 1e308]") == [2**63 - 1, -(2**63), 1e308]
    assert parse("1" + " " * (MAX_BYTES - 1)) == 1


def test_a_file_is_read_only_if_it_is_regular_and_short(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read(file) == {"a": 1}
    with pytest.raises(JsonError, match="at most 8"):
        read(file, max_bytes=8)
    os.truncate(file, 2**40)  # sparse: reading it whole would take a terabyte
    with pytest.raises(JsonError, match="1,099,511,627,776 bytes"):
        read(file)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JsonError, match="not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent")
