"""The study of a few noise levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import levels


def test_a_table_compares_runs_of_the_same_seed() -> None:
    text = levels.table({None: [0.5, 0.8], 4096: [0.5, 0.7], 4: [0.6, 0.7]})
    assert text.splitlines()[2:] == [
        "| any | 0.6500 | +0.0500 ± 0.0707 |", "| 4,096 | 0.6000 |  |", "| 4 | 0.6500 | +0.0500 ± 0.0707 |",
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_differ_in_their_levels_alone(tmp_path: Path) -> None:
    found = levels.losses(tmp_path, (None, 2), seeds=1, steps=2)
    assert list(found) == [None, 2] and found[None] != found[2]
