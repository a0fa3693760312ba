"""Mark the cases of a test as slow, except a few that ``./test.sh`` runs; draw some of many slow ones with a seed."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

SEED = os.environ.get("CASES_SEED", "all")
"""Chooses the slow cases of the largest tests; "all": every one."""
T = TypeVar("T")


def drawn(cases: Sequence[T], count: int, seed: str = SEED) -> list[T]:
    """``count`` of the cases, drawn with a seed; all for "all"."""
    return list(cases) if seed == "all" else random.Random(seed).sample(cases, min(count, len(cases)))


def slow_but(fast: Collection[object], cases: Iterable[Any]) -> list[Any]:
    """The cases as pytest parameters; those not in ``fast`` are slow.

    Raises:
        ValueError: one in ``fast`` is no case.
    """
    cases = list(cases)
    unknown = [each for each in fast if each not in cases]
    if unknown:
        raise ValueError(f"no such case: {unknown}")
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=() if each in fast else pytest.mark.slow)
        for each in cases
    ]
