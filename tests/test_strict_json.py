"""``strict_json``: what it refuses, where it says so, and that large texts take no longer for it."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletune.system.strict_json import MAX_DEPTH, JsonError, parse

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
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
        ("9" * 5000, "an integer has thousands of digits", (0, 0)),
        (b"\xff", "it is not UTF-8", (0, 0)),
        ("[" * 100_000, f"it is nested too deeply. At most {MAX_DEPTH} levels are read", (0, 0)),
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


def test_brackets_in_text_and_beside_each_other_are_not_depth() -> None:
    assert parse('["' + "[{" * 100 + '"]') == ["[{" * 100]
    assert parse("[" + "[]," * 100 + "[]]") == [[]] * 101


def test_a_duplicate_among_many_keys_is_found_in_linear_time() -> None:
    keys = ",".join(f'"{number}":0' for number in range(100_000))
    clock = time.perf_counter()
    with pytest.raises(JsonError, match='"last" appears twice'):
        parse(f'{{{keys},"last":0,"last":0}}')
    assert time.perf_counter() - clock < 5  # seconds; quadratic takes minutes
