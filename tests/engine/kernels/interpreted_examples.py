"""How many examples the tests in Triton's interpreter draw: all of them, or few and the same ones in the fast suite."""

from __future__ import annotations

import os

from hypothesis import Phase, settings

FEW = "SIMPLETUNE_KERNEL_EXAMPLES"
"""The environment variable with the largest number of examples that a test draws."""


def examples(count: int) -> settings:
    """Settings of a test that draws ``count`` examples, or as many as the variable ``FEW`` allows."""
    limit = os.environ.get(FEW)
    if limit is None:
        return settings(max_examples=count, deadline=None, phases=[Phase.generate])
    return settings(max_examples=min(count, int(limit)), deadline=None, phases=[Phase.generate], derandomize=True)
