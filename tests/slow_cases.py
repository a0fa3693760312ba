"""Mark the cases of a test as slow, except a few that ``./test.sh`` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
